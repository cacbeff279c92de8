// Augmentation of images as they are gathered: every backend gives what a plain reference computes
// from the same draws.
#include "kernels/ops/augment.hpp"

#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>
#include <set>

#include "tests/support/backends.hpp"
#include "tests/support/catch.hpp"

using namespace gyre;
using namespace gyre::test;

namespace {

constexpr int kImages = 40;
constexpr std::uint64_t kSeed = 77;
constexpr std::uint32_t kEpoch = 3;

AugmentArgs args_of(const AugmentSpec& spec, std::uint32_t& epoch) {
    return {spec, kSeed, &epoch};
}
DrawnAugment draw(const AugmentSpec& spec, int sample, const Shape& shape = {1, 28, 28},
                  std::uint32_t epoch = kEpoch) {
    return draw_augment(args_of(spec, epoch), shape, static_cast<std::uint32_t>(sample));
}

// A plane of pixels, some of which are the mean.
struct Plane {
    int height, width;
    std::vector<int> pixels;  // -1: the mean
    int at(int y, int x) const {
        return y < 0 || y >= height || x < 0 || x >= width
                   ? 0
                   : pixels[static_cast<std::size_t>(y * width + x)];
    }
    template <class Source>
    Plane moved(Source source) const {
        Plane to = *this;
        for (int y = 0; y < height; ++y) {
            for (int x = 0; x < width; ++x) {
                to.pixels[static_cast<std::size_t>(y * width + x)] = source(y, x);
            }
        }
        return to;
    }
};

// Applies the transforms one after another.
Plane reference(const Plane& image, const AugmentSpec& spec, const DrawnAugment& d) {
    Plane plane = image;
    if (spec.rotate > 0) {
        const double s = std::ldexp(static_cast<double>(d.sine), -30);
        const double c = std::ldexp(static_cast<double>(d.cosine), -30);
        const double cy = (plane.height - 1) / 2.0, cx = (plane.width - 1) / 2.0;
        plane = plane.moved([&](int y, int x) {
            return plane.at(static_cast<int>(std::floor(s * (x - cx) + c * (y - cy) + cy + 0.5)),
                            static_cast<int>(std::floor(c * (x - cx) - s * (y - cy) + cx + 0.5)));
        });
    }
    if (spec.shift > 0) {
        plane = plane.moved([&](int y, int x) {
            return plane.at(std::min(std::max(y + d.shift_y, 0), plane.height - 1),
                            std::min(std::max(x + d.shift_x, 0), plane.width - 1));
        });
    }
    if (spec.crop > 0) {
        plane = plane.moved([&](int y, int x) { return plane.at(y + d.crop_y, x + d.crop_x); });
    }
    if (d.flip != 0) {
        plane = plane.moved([&](int y, int x) { return plane.at(y, plane.width - 1 - x); });
    }
    return plane.moved([&](int y, int x) {
        const bool cut = y - d.cut_y >= 0 && y - d.cut_y < spec.cutout && x - d.cut_x >= 0 &&
                         x - d.cut_x < spec.cutout;
        return cut ? -1 : plane.at(y, x);
    });
}

const AugmentSpec kSpecs[] = {
    {.shift = 2},
    {.crop = 4},
    {.hflip = true},
    {.cutout = 3},
    {.rotate = 10},
    {.rotate = 180},
    {.rotate = 25, .shift = 1, .crop = 2, .hflip = true, .cutout = 4},
};

std::vector<std::uint8_t> test_pixels(const Shape& shape) {
    std::vector<std::uint8_t> pixels(static_cast<std::size_t>(kImages * shape.elems()));
    for (std::size_t i = 0; i < pixels.size(); ++i) {
        pixels[i] = static_cast<std::uint8_t>(1 + i * 31 % 251);
    }
    return pixels;
}

// The values of a batch, exact in float32.
Floats expected_values(const std::vector<std::uint8_t>& pixels, const Shape& shape,
                       const AugmentSpec& spec, const std::vector<std::int32_t>& samples,
                       const Floats& scale, const Floats& shift) {
    Floats values;
    for (const std::int32_t sample : samples) {
        const DrawnAugment drawn = draw(spec, sample, shape);
        for (int c = 0; c < shape.channels; ++c) {
            const auto* from = pixels.data() + sample * shape.elems() + c * shape.plane_elems();
            const Plane plane{shape.height, shape.width, {from, from + shape.plane_elems()}};
            for (const int pixel : reference(plane, spec, drawn).pixels) {
                const auto channel = static_cast<std::size_t>(c);
                values.push_back(
                    pixel < 0 ? 0.0f : static_cast<float>(pixel) * scale[channel] + shift[channel]);
            }
        }
    }
    return values;
}

}  // namespace

// Each pair occurs as often as chance gives, within six standard deviations.
TEST_CASE("the two axes are drawn independently, each in its own range", "[augment]") {
    const AugmentSpec spec{.shift = 1, .crop = 2, .cutout = 2};
    const Shape shape{1, 4, 7};  // not square
    constexpr int kDraws = 5600;
    std::map<std::pair<int, int>, int> shifts, crops, cuts, firsts;
    for (int sample = 0; sample < kDraws; ++sample) {
        const DrawnAugment drawn = draw(spec, sample, shape);
        ++shifts[{drawn.shift_y, drawn.shift_x}];
        ++crops[{drawn.crop_y, drawn.crop_x}];
        ++cuts[{drawn.cut_y, drawn.cut_x}];
        ++firsts[{drawn.shift_y, drawn.crop_y}];
    }
    const auto check = [](const std::map<std::pair<int, int>, int>& pairs, int low_y, int high_y,
                          int low_x, int high_x) {
        const int count = (high_y - low_y + 1) * (high_x - low_x + 1);
        const double mean = double{kDraws} / count;
        CHECK(static_cast<int>(pairs.size()) == count);
        for (const auto& [pair, times] : pairs) {
            INFO(pair.first << ", " << pair.second);
            CHECK((pair.first >= low_y && pair.first <= high_y));
            CHECK((pair.second >= low_x && pair.second <= high_x));
            CHECK(std::abs(times - mean) < 6 * std::sqrt(mean));
        }
    };
    check(shifts, -1, 1, -1, 1);
    check(crops, -2, 2, -2, 2);
    check(cuts, -1, shape.height - 2, -1, shape.width - 2);
    check(firsts, -1, 1, -2, 2);
}

TEST_CASE("integer angles agree with sin and cos", "[augment]") {
    for (int steps = -180 * 128; steps <= 180 * 128; steps += 37) {
        DrawnAugment drawn;
        set_angle(drawn, steps);
        const double angle = steps / 128.0 * std::acos(-1.0) / 180.0;
        CHECK(std::abs(std::ldexp(double(drawn.sine), -30) - std::sin(angle)) < 0x1p-25);
        CHECK(std::abs(std::ldexp(double(drawn.cosine), -30) - std::cos(angle)) < 0x1p-25);
    }
    DrawnAugment none;
    set_angle(none, 0);
    CHECK((none.sine == 0 && none.cosine == DrawnAugment::kOne));
}

TEST_CASE("draws are in range and depend on seed, epoch and image", "[augment]") {
    const AugmentSpec spec{.rotate = 10, .shift = 2, .crop = 1, .hflip = true, .cutout = 8};
    std::set<int> shifts, crops, cuts;
    int flips = 0, left_turns = 0;
    constexpr int kDraws = 4000;
    for (int sample = 0; sample < kDraws; ++sample) {
        const DrawnAugment d = draw(spec, sample);
        shifts.insert({d.shift_y, 10 + d.shift_x});
        crops.insert({d.crop_y, 10 + d.crop_x});
        cuts.insert({d.cut_y, 100 + d.cut_x});
        flips += d.flip;
        left_turns += d.sine > 0;
        CHECK(std::abs(double(d.sine)) <= std::ldexp(std::sin(10.01 / 180 * std::acos(-1.0)), 30));
    }
    CHECK(shifts == std::set<int>{-2, -1, 0, 1, 2, 8, 9, 10, 11, 12});
    CHECK(crops == std::set<int>{-1, 0, 1, 9, 10, 11});
    CHECK(cuts.size() == 2 * 28);
    CHECK(*cuts.begin() == -4);
    // Within six standard deviations.
    CHECK(std::abs(flips - kDraws / 2) < 190);
    CHECK(std::abs(left_turns - kDraws / 2) < 190);

    const auto numbers = [](const DrawnAugment& d) {
        return std::vector<std::int64_t>{d.shift_y, d.shift_x, d.cut_y, d.cut_x, d.sine};
    };
    const auto one = numbers(draw(spec, 5));
    CHECK(numbers(draw(spec, 5)) == one);
    CHECK(numbers(draw(spec, 6)) != one);
    CHECK(numbers(draw(spec, 5, {1, 28, 28}, kEpoch + 1)) != one);
    std::uint32_t epoch = kEpoch;
    CHECK(numbers(draw_augment({spec, kSeed + 1, &epoch}, {1, 28, 28}, 5)) != one);
}

TEST_CASE("transforms do what their names say", "[augment]") {
    DrawnAugment d = draw({}, 0, {1, 2, 3});
    const auto shown = [&] {
        std::vector<int> sources;
        for (int at = 0; at < 6; ++at) {
            sources.push_back(d.source(at / 3, at % 3));
        }
        return sources;
    };
    constexpr int kBlack = DrawnAugment::kBlack, kMean = DrawnAugment::kMean;
    const DrawnAugment plain = d;
    CHECK(shown() == std::vector{0, 1, 2, 3, 4, 5});
    d.flip = 1;
    CHECK(shown() == std::vector{2, 1, 0, 5, 4, 3});
    d = plain;
    d.shift_x = 1;
    CHECK(shown() == std::vector{1, 2, 2, 4, 5, 5});
    d = plain;
    d.crop_y = -1;
    CHECK(shown() == std::vector{kBlack, kBlack, kBlack, 0, 1, 2});
    d = plain;
    d.cut = 2;
    d.cut_x = 1;
    d.cut_y = -1;
    CHECK(shown() == std::vector{0, kMean, kMean, 3, 4, 5});
    d = plain;
    set_angle(d, 180 * 128);
    CHECK(shown() == std::vector{5, 4, 3, 2, 1, 0});
    // A quarter turn counterclockwise: what was on the right is now on top.
    d = draw({}, 0, {1, 3, 3});
    set_angle(d, 90 * 128);
    CHECK(d.source(0, 1) == 5);
    CHECK(d.source(1, 0) == 1);
}

TEST_CASE("gathered images match the reference augmentation to the last bit", "[augment][gpu]") {
    on_every_backend([](Bench& bench) {
        for (const Shape& shape : {Shape{1, 12, 12}, {3, 5, 7}, {2, 20, 26}}) {
            const auto pixels = test_pixels(shape);
            DeviceBuffer<std::uint8_t> dev_pixels(bench.backend, kImages * shape.elems());
            bench.backend.upload(dev_pixels.get(), pixels.data(), pixels.size());
            std::vector<std::int32_t> labels(kImages);
            std::iota(labels.begin(), labels.end(), 0);
            const auto dev_labels = bench.array(labels);
            const Floats scale = {0.5f, 0.25f, 2.0f}, shift = {-1.0f, 0.5f, 3.0f};
            const auto dev_scale = bench.array(scale), dev_shift = bench.array(shift);
            const DeviceBuffer<EpochPlace> place(bench.backend, 1);
            const EpochPlace start{.epoch = kEpoch, .step = 1};
            const NextSamplesArgs next{.order = EpochOrder(11, kImages, true),
                                       .place = place.get(),
                                       .step_images = 7,
                                       .first = 2};
            for (const AugmentSpec& spec : kSpecs) {
                // The same images in the order of the batch and in that of the set.
                for (const int n : {17, 3}) {
                    INFO(shape.channels << "x" << shape.height << "x" << shape.width << ", rotate "
                                        << spec.rotate << ", crop " << spec.crop << ", n = " << n);
                    bench.backend.upload(place.get(), &start, sizeof start);
                    DeviceBuffer<std::int32_t> samples(bench.backend, n), y(bench.backend, n);
                    GatherArgs args{.pixels = dev_pixels.get(),
                                    .labels = dev_labels.get(),
                                    .samples = nullptr,
                                    .shape = shape,
                                    .scale = dev_scale.get(),
                                    .shift = dev_shift.get(),
                                    .augment = {spec, kSeed, &place.get()->epoch}};
                    const Guarded x = bench.empty_activation(shape, n);
                    bench.backend.gather_next(next, args, n, samples.get(), x.get(), y.get());
                    std::vector<std::int32_t> taken(static_cast<std::size_t>(n)), found(taken);
                    bench.backend.download(taken.data(), samples.get(), samples.bytes());
                    bench.backend.download(found.data(), y.get(), y.bytes());
                    CHECK(found == taken);
                    CHECK(bench.read(shape, n, x) ==
                          expected_values(pixels, shape, spec, taken, scale, shift));
                    std::sort(taken.begin(), taken.end());
                    bench.backend.upload(samples.get(), taken.data(), samples.bytes());
                    args.samples = samples.get();
                    bench.backend.gather(args, n, x.get(), y.get());
                    CHECK(bench.read(shape, n, x) ==
                          expected_values(pixels, shape, spec, taken, scale, shift));
                }
            }
        }
    });
}
