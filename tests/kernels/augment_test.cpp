// Augmentation of images as they are gathered: every backend gives what a plain reference computes
// from the same draws.
#include "kernels/ops/augment.hpp"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <fstream>
#include <map>
#include <numeric>
#include <set>

#include "kernels/ops/mix.hpp"
#include "tests/support/backends.hpp"
#include "tests/support/bounded.hpp"
#include "tests/support/catch.hpp"

using namespace gyre;
using namespace gyre::test;

namespace {

constexpr int kImages = 40;
constexpr std::uint64_t kSeed = 77;
constexpr std::uint32_t kEpoch = 3;

AugmentArgs args_of(const AugmentSpec& spec, std::uint32_t& epoch) {
    return {spec, kSeed, &epoch, kImages};
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

// Resizes the part, with weights in 2^-11.
Plane resized(const Plane& image, const Box& part) {
    const auto at = [](int i, int extent, int whole) {
        const double place = (i + 0.5) * extent / whole - 0.5;
        return std::floor(std::max(place, 0.0) * 2048 + 0.5) / 2048;
    };
    return image.moved([&](int y, int x) {
        const double row = at(y, part.height, image.height),
                     column = at(x, part.width, image.width);
        double sum = 0.0;
        for (int i = 0; i < part.height; ++i) {
            for (int j = 0; j < part.width; ++j) {
                sum += std::max(0.0, 1.0 - std::abs(i - std::min(row, part.height - 1.0))) *
                       std::max(0.0, 1.0 - std::abs(j - std::min(column, part.width - 1.0))) *
                       image.at(part.y + i, part.x + j);
            }
        }
        return static_cast<int>(std::floor(sum + 0.5));
    });
}

// Applies the transforms one after another.
Plane reference(const Plane& image, const AugmentSpec& spec, const DrawnAugment& d) {
    Plane plane = spec.resized_crop > 0 ? resized(image, d.part) : image;
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
        const bool cut = y - d.cut.y >= 0 && y - d.cut.y < spec.cutout && x - d.cut.x >= 0 &&
                         x - d.cut.x < spec.cutout;
        const bool erased = spec.erasing > 0 && y >= d.erased.y &&
                            y - d.erased.y < d.erased.height && x >= d.erased.x &&
                            x - d.erased.x < d.erased.width;
        return cut || erased ? -1 : plane.at(y, x);
    });
}

const AugmentSpec kSpecs[] = {
    {.shift = 2},
    {.crop = 4},
    {.flip = Flip::random},
    {.flip = Flip::alternating},
    {.flip = Flip::always},
    {.cutout = 3},
    {.rotate = 10},
    {.rotate = 180},
    {.rotate = 25, .shift = 1, .crop = 2, .flip = Flip::random, .cutout = 4},
    {.resized_crop = 8},
    {.erasing = 50},
    {.resized_crop = 20,
     .rotate = 15,
     .crop = 1,
     .flip = Flip::random,
     .cutout = 2,
     .erasing = 100},
    {.mixup = 500},
    {.cutmix = 1000},
    {.shift = 1, .cutout = 3, .mixup = 1000, .cutmix = 1000},
};

std::vector<std::uint8_t> test_pixels(const Shape& shape) {
    std::vector<std::uint8_t> pixels(static_cast<std::size_t>(kImages * shape.elems()));
    for (std::size_t i = 0; i < pixels.size(); ++i) {
        pixels[i] = static_cast<std::uint8_t>(1 + i * 31 % 251);
    }
    return pixels;
}

DrawnMix draw_partner(const AugmentSpec& spec, int sample, const Shape& shape) {
    std::uint32_t epoch = kEpoch;
    return draw_mix(args_of(spec, epoch), shape, static_cast<std::uint32_t>(sample));
}

// The values of a batch, exact in float32 but for a mixup's two products and their sum.
std::vector<Bounded> expected_values(const std::vector<std::uint8_t>& pixels, const Shape& shape,
                                     const AugmentSpec& spec,
                                     const std::vector<std::int32_t>& samples, const Floats& scale,
                                     const Floats& shift) {
    const auto plane_of = [&](std::int32_t sample, int c) {
        const auto* from = pixels.data() + sample * shape.elems() + c * shape.plane_elems();
        const Plane plane{shape.height, shape.width, {from, from + shape.plane_elems()}};
        std::vector<double> values;
        for (const int pixel : reference(plane, spec, draw(spec, sample, shape)).pixels) {
            const auto channel = static_cast<std::size_t>(c);
            values.push_back(pixel < 0 ? 0.0
                                       : pixel * double{scale[channel]} + double{shift[channel]});
        }
        return values;
    };
    std::vector<Bounded> values;
    for (const std::int32_t sample : samples) {
        const DrawnMix mix = spec.mixes() ? draw_partner(spec, sample, shape) : DrawnMix{};
        for (int c = 0; c < shape.channels; ++c) {
            const std::vector<double> own = plane_of(sample, c);
            const std::vector<double> others = spec.mixes() ? plane_of(mix.partner, c) : own;
            for (std::size_t at = 0; at < own.size(); ++at) {
                const int y = static_cast<int>(at) / shape.width;
                const int x = static_cast<int>(at) % shape.width;
                const double share = std::ldexp(mix.share, -16);
                values.push_back(!spec.mixes() ? Bounded(own[at])
                                 : mix.box.height > 0
                                     ? Bounded(mix.box.contains(y, x) ? others[at] : own[at])
                                     : Bounded(share) * own[at] +
                                           Bounded(1.0 - share) * others[at]);
            }
        }
    }
    return values;
}

// The labels that gather writes, if an image's label is its index.
std::vector<std::int32_t> expected_labels(const Shape& shape, const AugmentSpec& spec,
                                          const std::vector<std::int32_t>& samples) {
    std::vector<std::int32_t> labels = samples;
    for (int row = 1; row < 3 && spec.mixes(); ++row) {
        for (const std::int32_t sample : samples) {
            const DrawnMix mix = draw_partner(spec, sample, shape);
            labels.push_back(row == 1 ? mix.partner : mix.share);
        }
    }
    return labels;
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
        ++cuts[{drawn.cut.y, drawn.cut.x}];
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
    const AugmentSpec spec{.rotate = 10, .shift = 2, .crop = 1, .flip = Flip::random, .cutout = 8};
    std::set<int> shifts, crops, cuts;
    int flips = 0, left_turns = 0;
    constexpr int kDraws = 4000;
    for (int sample = 0; sample < kDraws; ++sample) {
        const DrawnAugment d = draw(spec, sample);
        shifts.insert({d.shift_y, 10 + d.shift_x});
        crops.insert({d.crop_y, 10 + d.crop_x});
        cuts.insert({d.cut.y, 100 + d.cut.x});
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
        return std::vector<std::int64_t>{d.shift_y, d.shift_x, d.cut.y, d.cut.x, d.sine};
    };
    const auto one = numbers(draw(spec, 5));
    CHECK(numbers(draw(spec, 5)) == one);
    CHECK(numbers(draw(spec, 6)) != one);
    CHECK(numbers(draw(spec, 5, {1, 28, 28}, kEpoch + 1)) != one);
    std::uint32_t epoch = kEpoch;
    CHECK(numbers(draw_augment({spec, kSeed + 1, &epoch}, {1, 28, 28}, 5)) != one);
}

TEST_CASE("flips are random, alternate or always happen", "[augment]") {
    const auto flips = [](Flip flip, std::uint32_t epoch) {
        std::vector<int> drawn;
        for (std::uint32_t sample = 0; sample < 100; ++sample) {
            drawn.push_back(
                draw_augment({{.flip = flip}, kSeed, &epoch}, {1, 28, 28}, sample).flip);
        }
        return drawn;
    };
    const std::vector<int> first = flips(Flip::random, 0);
    CHECK(std::set(first.begin(), first.end()) == std::set{0, 1});
    CHECK(flips(Flip::random, 2) != first);
    CHECK(flips(Flip::alternating, 0) == first);
    CHECK(flips(Flip::alternating, 6) == first);
    std::vector<int> mirrored = first;
    for (int& flip : mirrored) {
        flip = 1 - flip;
    }
    CHECK(flips(Flip::alternating, 7) == mirrored);
    CHECK(flips(Flip::always, 7) == std::vector(100, 1));
    CHECK(flips(Flip::never, 7) == std::vector(100, 0));
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
    d.cut = {-1, 1, 2, 2};
    CHECK(shown() == std::vector{0, kMean, kMean, 3, 4, 5});
    d = plain;
    d.erased = {1, 0, 1, 2};
    CHECK(shown() == std::vector{0, 1, 2, kMean, kMean, 5});
    d = plain;
    set_angle(d, 180 * 128);
    CHECK(shown() == std::vector{5, 4, 3, 2, 1, 0});
    // A quarter turn counterclockwise: what was on the right is now on top.
    d = draw({}, 0, {1, 3, 3});
    set_angle(d, 90 * 128);
    CHECK(d.source(0, 1) == 5);
    CHECK(d.source(1, 0) == 1);
    // Two of four columns, and all of the rows.
    d = draw({}, 0, {1, 1, 4});
    d.part = {0, 1, 1, 2};
    d.step_x = DrawnAugment::kStep / 2;
    const std::uint8_t plane[] = {7, 100, 200, 9};
    std::vector<int> pixels;
    for (const int source : {0, 1, 2, 3, DrawnAugment::kBlack}) {
        pixels.push_back(d.pixel(plane, source));
    }
    CHECK(pixels == std::vector{100, 125, 175, 200, 0});
}

TEST_CASE("integer powers and roots agree with exp2 and sqrt", "[augment]") {
    for (int log = -(1 << 17) + 1; log < 1 << 17; log += 13) {
        const double less = std::ldexp(std::exp2(log / 65536.0), 16) - double(exp2_16(log));
        CHECK((less >= -0.001 && less <= 2.0));
    }
    for (const std::int64_t number :
         {1, 2, 3, 12, 13, 20, 21, 1000, 65535, 1 << 28, (1 << 29) - 1}) {
        CHECK(rounded_root(number << 32) == std::lround(std::sqrt(double(number))));
    }
    CHECK(rounded_root((std::int64_t{1} << 62) - 1) == 1 << 15);
}

// Means are within six standard deviations, whose bounds are those of a uniform draw.
TEST_CASE("random parts have the areas and the ratios of torchvision's", "[augment]") {
    constexpr int kDraws = 3000;
    for (const Shape& shape : {Shape{1, 224, 224}, {1, 100, 150}}) {
        double areas = 0.0, logs = 0.0, middles = 0.0, erased_areas = 0.0;
        int erased = 0;
        for (int sample = 0; sample < kDraws; ++sample) {
            const DrawnAugment d = draw({.resized_crop = 25, .erasing = 40}, sample, shape);
            for (const Box& box : {d.part, d.erased}) {
                CHECK((box.y >= 0 && box.x >= 0 && box.y + box.height <= shape.height &&
                       box.x + box.width <= shape.width));
            }
            const double pixels = double(shape.height) * shape.width;
            const double area = d.part.height * d.part.width / pixels;
            CHECK((area > 0.24 && area <= 1.0));
            const double ratio = double(d.part.width) / d.part.height;
            CHECK((ratio > 0.75 * 0.98 && ratio < 1.02 / 0.75));
            CHECK(d.step_y == (std::int64_t{d.part.height} << 32) / shape.height);
            CHECK(d.step_x == (std::int64_t{d.part.width} << 32) / shape.width);
            areas += area / kDraws;
            logs += std::log(ratio) / kDraws;
            middles += (2 * d.part.x + d.part.width) / double(2 * shape.width) / kDraws;
            if (d.erased.height > 0) {
                const double share = d.erased.height * d.erased.width / pixels;
                const double aspect = double(d.erased.height) / d.erased.width;
                CHECK((share > 0.018 && share < 0.34 && aspect > 0.28 && aspect < 3.5));
                erased_areas += share;
                ++erased;
            }
        }
        CHECK(std::abs(middles - 0.5) < 6 * 0.29 / std::sqrt(kDraws));
        CHECK(std::abs(erased - 0.4 * kDraws) < 6 * std::sqrt(0.24 * kDraws));
        // Large areas with large ratios do not fit, and are drawn again.
        CHECK((areas > 0.45 && areas < 0.625 + 6 * 0.22 / std::sqrt(kDraws)));
        CHECK(std::abs(erased_areas / erased - 0.175) < 6 * 0.09 / std::sqrt(erased) + 0.01);
        if (shape.height == shape.width) {
            CHECK(std::abs(logs) < 6 * 0.17 / std::sqrt(kDraws));
        }
    }
    // No part of so narrow an image has such a ratio: it is the largest in the middle that has.
    const Box part = draw({.resized_crop = 100}, 0, {1, 10, 80}).part;
    CHECK((part.y == 0 && part.x == 33 && part.height == 10 && part.width == 13));
    const Box tall = draw({.resized_crop = 100}, 0, {1, 80, 10}).part;
    CHECK((tall.y == 33 && tall.x == 0 && tall.height == 13 && tall.width == 10));
    CHECK(draw({.erasing = 100}, 0, {1, 1, 1}).erased.height == 0);
}

// Beta(a, a) has the mean 1/2 and the variance 1 / (4 (2 a + 1)), of which no draw is further than
// 1/2 from the mean. All within six standard deviations.
TEST_CASE("shares of mixed images have their distribution", "[augment]") {
    CHECK(minus_log2_16(~0u) == 0);
    CHECK(minus_log2_16(0) == 32 << 16);
    for (std::uint32_t word = 1; word < 1u << 31; word = word * 3 + 1) {
        CHECK(std::abs(double(minus_log2_16(word)) -
                       65536.0 * (32.0 - std::log2(double(word) + 1.0))) <= 1.0);
    }
    const Shape shape{1, 20, 30};
    constexpr int kDraws = 4000;
    for (const int thousandths : {200, 500, 1000}) {
        for (const bool cut : {false, true}) {
            const AugmentSpec spec{.mixup = cut ? 0 : thousandths, .cutmix = cut ? thousandths : 0};
            double sum = 0.0, squares = 0.0;
            std::vector<int> partners(kImages);
            for (int sample = 0; sample < kDraws; ++sample) {
                const DrawnMix mix = draw_partner(spec, sample, shape);
                REQUIRE((mix.partner >= 0 && mix.partner < kImages && mix.share >= 0 &&
                         mix.share <= DrawnMix::kWhole));
                ++partners[static_cast<std::size_t>(mix.partner)];
                const double share = std::ldexp(mix.share, -16);
                sum += share;
                squares += (share - 0.5) * (share - 0.5);
                CHECK((cut || mix.box.height == 0));
                if (mix.box.height > 0) {
                    CHECK((mix.box.y >= 0 && mix.box.y + mix.box.height <= 20 && mix.box.x >= 0 &&
                           mix.box.width > 0 && mix.box.x + mix.box.width <= 30));
                    CHECK(std::abs(1.0 - mix.box.height * mix.box.width / 600.0 - share) < 0x1p-16);
                }
            }
            if (!cut) {
                const double variance = 1000.0 / (4.0 * (2.0 * thousandths + 1000.0));
                CHECK(std::abs(sum / kDraws - 0.5) < 6 * std::sqrt(variance / kDraws));
                CHECK(std::abs(squares / kDraws - variance) < 6 * 0.125 / std::sqrt(kDraws));
            }
            CHECK(*std::min_element(partners.begin(), partners.end()) >
                  40);  // 100 of each expected
            CHECK(*std::max_element(partners.begin(), partners.end()) < 160);
        }
    }
    // With both, each of them in half of the images.
    int cuts = 0;
    for (int sample = 0; sample < kDraws; ++sample) {
        cuts += draw_partner({.mixup = 1000, .cutmix = 1000}, sample, shape).box.height > 0;
    }
    // A box may have no pixel, but only seldom.
    CHECK(std::abs(cuts - 0.5 * kDraws) < 6 * std::sqrt(0.25 * kDraws) + 0.01 * kDraws);
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
                    DeviceBuffer<std::int32_t> samples(bench.backend, n);
                    const DeviceBuffer<std::int32_t> y(bench.backend, spec.mixes() ? 3 * n : n);
                    GatherArgs args{.pixels = dev_pixels.get(),
                                    .labels = dev_labels.get(),
                                    .samples = nullptr,
                                    .shape = shape,
                                    .scale = dev_scale.get(),
                                    .shift = dev_shift.get(),
                                    .augment = {spec, kSeed, &place.get()->epoch, kImages}};
                    const Guarded x = bench.empty_activation(shape, n);
                    bench.backend.gather_next(next, args, n, samples.get(), x.get(), y.get());
                    std::vector<std::int32_t> taken(static_cast<std::size_t>(n));
                    std::vector<std::int32_t> found(static_cast<std::size_t>(y.elems()));
                    bench.backend.download(taken.data(), samples.get(), samples.bytes());
                    bench.backend.download(found.data(), y.get(), y.bytes());
                    CHECK(found == expected_labels(shape, spec, taken));
                    check_within(bench.read(shape, n, x),
                                 expected_values(pixels, shape, spec, taken, scale, shift));
                    std::sort(taken.begin(), taken.end());
                    bench.backend.upload(samples.get(), taken.data(), samples.bytes());
                    args.samples = samples.get();
                    bench.backend.gather(args, n, x.get(), y.get());
                    check_within(bench.read(shape, n, x),
                                 expected_values(pixels, shape, spec, taken, scale, shift));
                }
            }
        }
    });
}

// Its file is what torchvision_test.py compares: of each image the part, what is erased, and the
// pixels, of which -1 is the mean.
TEST_CASE("augmented images for torchvision", "[.torchvision]") {
    const char* const path = std::getenv("GYRE_TEST_AUGMENTED");
    if (path == nullptr) {
        return;  // one of all tests
    }
    const Shape shape{3, 40, 56};
    const auto pixels = test_pixels(shape);
    std::ofstream file(path);
    for (int sample = 0; sample < kImages; ++sample) {
        const auto* image = pixels.data() + sample * shape.elems();
        const DrawnAugment drawn = draw({.resized_crop = 8, .erasing = 50}, sample, shape);
        for (const Box& box : {drawn.part, drawn.erased}) {
            file << box.y << ' ' << box.x << ' ' << box.height << ' ' << box.width << ' ';
        }
        for (int c = 0; c < shape.channels; ++c) {
            for (int at = 0; at < shape.plane_elems(); ++at) {
                const int source = drawn.source(at / shape.width, at % shape.width);
                file << (source < 0 ? -1 : drawn.pixel(image + c * shape.plane_elems(), source))
                     << ' ';
            }
        }
        for (int at = 0; at < shape.elems(); ++at) {
            file << int{image[at]} << ' ';
        }
        file << '\n';
    }
    REQUIRE(file.flush());
}
