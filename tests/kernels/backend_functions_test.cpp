// The functions of a Backend that are not operations of a net, on every backend: loss, samples,
// 16-bit types and transfers. Clipping and optimizers are in update_kernels_test.cpp.
#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <utility>
#include <vector>

#include "data/sampler.hpp"
#include "tests/kernels/run_op.hpp"
#include "tests/support/backends.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/typed_values.hpp"

using namespace gyre;
using namespace gyre::test;

namespace {

// The compiler's own 16-bit type; g++ 12 knows the standard name only on x86.
#if defined(__aarch64__)
using Half = __fp16;
#else
using Half = _Float16;
#endif

const int kBatches[] = {1, 15, 17, 64};

}  // namespace

TEST_CASE("cross entropy: loss, count and gradient match double precision", "[gpu]") {
    const float smoothing = GENERATE(0.0f, 0.1f, 0.75f);
    const bool weighted = GENERATE(false, true), mixed = GENERATE(false, true);
    on_every_backend([&](Bench& bench) {
        for (const int classes : {2, 5, 10, 63}) {
            for (const int n : kBatches) {
                for (const float spread : {1.0f, 200.0f}) {  // 200: needs the shift by max
                    INFO(classes << " classes, n = " << n << ", spread " << spread
                                 << ", label smoothing " << smoothing << ", weights " << weighted
                                 << ", mixed " << mixed);
                    const Shape shape{classes, 1, 1};
                    Floats logits = random_floats(n * classes, 16);
                    std::vector<std::int32_t> labels(static_cast<std::size_t>(mixed ? 3 * n : n));
                    const float scale = 1.0f / static_cast<float>(n + 3);
                    double loss = 0.0;
                    int correct = 0;
                    std::vector<double> gradient;
                    Floats weights(static_cast<std::size_t>(classes), 1.0f);
                    for (std::size_t k = 0; weighted && k < weights.size(); ++k) {
                        weights[k] = static_cast<float>(k) * 3.0f / static_cast<float>(classes);
                    }
                    for (int i = 0; i < n; ++i) {
                        float* row = &logits[static_cast<std::size_t>(i * classes)];
                        std::transform(row, row + classes, row,
                                       [&](float v) { return v * spread; });
                        const int both[] = {(i * 5 + 1) % classes, i * 3 % classes};
                        const int parts = mixed ? i * 7919 % 65537 : 65536;  // of 2^16
                        labels[static_cast<std::size_t>(i)] = both[0];
                        if (mixed) {
                            labels[static_cast<std::size_t>(n + i)] = both[1];
                            labels[static_cast<std::size_t>(2 * n + i)] = parts;
                        }
                        const auto best = std::max_element(row, row + classes) - row;
                        correct += best == both[parts < 32768 ? 1 : 0];
                        double sum = 0.0;
                        for (int k = 0; k < classes; ++k) {
                            sum += std::exp(double{row[k]} - double{row[best]});
                        }
                        std::vector<double> of_image(weights.size());
                        for (const int j : {0, 1}) {
                            const int label = both[j];
                            const double share = j == 0 ? parts : 65536 - parts;
                            const double weight =
                                double{weights[static_cast<std::size_t>(label)]} * share / 65536;
                            loss +=
                                weight * (std::log(sum) + double{row[best]} - double{row[label]});
                            const double each = double{smoothing} / classes;
                            for (int k = 0; k < classes; ++k) {
                                loss += weight * each * (double{row[label]} - double{row[k]});
                                const double target = k == label ? 1.0 - double{smoothing} : 0.0;
                                const double p = std::exp(double{row[k]} - double{row[best]}) / sum;
                                of_image[static_cast<std::size_t>(k)] +=
                                    double{scale} * weight * (p - target - each);
                            }
                        }
                        gradient.insert(gradient.end(), of_image.begin(), of_image.end());
                    }
                    const Guarded dev_logits = bench.activation(shape, n, logits);
                    const Guarded dev_gradient = bench.empty_activation(shape, n);
                    const Guarded sums = bench.empty(2);
                    const auto dev_labels = bench.array(labels);
                    const Guarded dev_weights = bench.vector(weights);
                    const float* const of_classes = weighted ? dev_weights.get() : nullptr;
                    bench.backend.cross_entropy(
                        {classes, dev_logits.get(), dev_labels.get(), scale, dev_gradient.get(),
                         sums.get(), smoothing, of_classes, mixed},
                        n);
                    const Floats found = sums.download();
                    // A few roundings for exp, sum, log and their differences.
                    const double eps = 0x1p-24 * (classes + 16);
                    CHECK(std::abs(double{found[0]} - loss * double{scale}) <=
                          3.0 * eps * double{scale} * n * double{spread + 4.0f});
                    CHECK(found[1] == static_cast<float>(correct));
                    const Floats g = bench.read(shape, n, dev_gradient);
                    double worst = 0.0;
                    for (std::size_t i = 0; i < g.size(); ++i) {
                        const double error = std::abs(double{g[i]} - gradient[i]);
                        worst = error <= worst ? worst : error;
                    }
                    CHECK(worst <= 3.0 * eps * double{scale});  // no weight exceeds 3
                    // Runs without a gradient; lanes beyond the batch get none.
                    bench.backend.cross_entropy({classes, dev_logits.get(), dev_labels.get(), scale,
                                                 nullptr, sums.get(), smoothing, of_classes, mixed},
                                                n);
                    CHECK(sums.download() == found);
                    double total = 0.0, inside = 0.0;
                    for (const float v : dev_gradient.download()) {
                        total += std::abs(double{v});
                    }
                    for (const float v : g) {
                        inside += std::abs(double{v});
                    }
                    CHECK(total == Approx(inside));
                }
            }
        }
    });
}

TEST_CASE("the first of several equal largest logits is the answer", "[gpu]") {
    on_every_backend([](Bench& bench) {
        const int classes = 5, n = 10;
        Floats logits(n * classes, -1.0f);
        std::vector<std::int32_t> labels;
        for (int i = 0; i < n; ++i) {  // classes 1 and 3 are equal
            logits[static_cast<std::size_t>(i * classes + 1)] = 2.0f;
            logits[static_cast<std::size_t>(i * classes + 3)] = 2.0f;
            labels.push_back(i % 5 < 3 ? 1 : 3);
        }
        const Guarded dev_logits = bench.activation({classes, 1, 1}, n, logits);
        const Guarded sums = bench.empty(2);
        bench.backend.cross_entropy(
            {classes, dev_logits.get(), bench.array(labels).get(), 1.0f, nullptr, sums.get()}, n);
        CHECK(sums.download()[1] == 6.0f);
    });
}

TEST_CASE("a device computes the images of successive steps as the host does", "[gpu]") {
    on_every_backend([](Bench& bench) {
        for (const std::int64_t count : {10, 64, 65, 1000, 5000}) {
            for (const bool shuffle : {true, false}) {
                const std::uint32_t epoch = 3;
                const auto order = data::epoch_order(count, 11, epoch, shuffle);
                const EpochPlace start{.epoch = epoch, .step = 1};
                const DeviceBuffer<EpochPlace> place(bench.backend, 1);
                bench.backend.upload(place.get(), &start, sizeof start);
                const DeviceBuffer<std::int32_t> samples(bench.backend, count);
                // The second half of two steps, part of the rest in the last, none of one more.
                const std::int64_t step_images = count * 3 / 10;
                const std::int64_t half = step_images / 2;
                const std::pair<std::int64_t, int> parts[] = {
                    {half, static_cast<int>(step_images - half)}, {half, 1}, {1, 0}, {0, 0}};
                for (std::uint32_t i = 0; i < 4; ++i) {
                    INFO(count << " images, step " << i + 1);
                    const auto [first, n] = parts[i];
                    bench.backend.next_samples({.order = EpochOrder(11, count, shuffle),
                                                .place = place.get(),
                                                .step_images = step_images,
                                                .first = first},
                                               n, samples.get());
                    std::vector<std::int32_t> found(static_cast<std::size_t>(n));
                    bench.backend.download(found.data(), samples.get(),
                                           found.size() * sizeof(std::int32_t));
                    const auto at = static_cast<std::size_t>((i + 1) * step_images + first);
                    for (std::size_t k = 0; k < found.size(); ++k) {
                        CHECK(found[k] == order[at + k]);
                    }
                    EpochPlace after;
                    bench.backend.download(&after, place.get(), sizeof after);
                    CHECK(after.epoch == epoch);
                    CHECK(after.step == i + 2);
                }
            }
        }
    });
}

TEST_CASE("gather_next gathers the images that next_samples computes", "[gpu]") {
    on_every_backend([](Bench& bench) {
        const int images = 70;
        for (const Shape& shape : {Shape{1, 28, 28}, {3, 5, 7}, {2, 50, 52}}) {
            const std::int64_t elems = shape.elems();
            std::vector<std::uint8_t> pixels(static_cast<std::size_t>(images * elems));
            for (std::size_t i = 0; i < pixels.size(); ++i) {
                pixels[i] = static_cast<std::uint8_t>(i * 31 % 251);
            }
            std::vector<std::int32_t> labels(images);
            std::iota(labels.begin(), labels.end(), 0);
            DeviceBuffer<std::uint8_t> dev_pixels(bench.backend, images * elems);
            bench.backend.upload(dev_pixels.get(), pixels.data(), pixels.size());
            const auto dev_labels = bench.array(labels);
            const auto scale = bench.array(Floats{0.5f, 0.25f, 2.0f});
            const auto shift = bench.array(Floats{-1.0f, 0.5f, 3.0f});
            GatherArgs args{.pixels = dev_pixels.get(),
                            .labels = dev_labels.get(),
                            .samples = nullptr,
                            .shape = shape,
                            .scale = scale.get(),
                            .shift = shift.get()};
            const DeviceBuffer<EpochPlace> place(bench.backend, 1);
            const NextSamplesArgs next{.order = EpochOrder(11, images, true),
                                       .place = place.get(),
                                       .step_images = 20,
                                       .first = 3};
            const EpochPlace start{.epoch = 2, .step = 1};
            for (const int n : {17, 1, 0}) {
                INFO(shape.channels << "x" << shape.height << "x" << shape.width << ", n = " << n);
                std::vector<std::int32_t> found[2], found_labels[2];
                Floats x[2];
                for (const bool apart : {true, false}) {
                    bench.backend.upload(place.get(), &start, sizeof start);
                    DeviceBuffer<std::int32_t> samples(bench.backend, n + 1),
                        y(bench.backend, n + 1);
                    const Guarded to = bench.empty_activation(shape, n);
                    if (apart) {
                        bench.backend.next_samples(next, n, samples.get());
                        args.samples = samples.get();
                        bench.backend.gather(args, n, to.get(), y.get());
                        args.samples = nullptr;
                    } else {
                        bench.backend.gather_next(next, args, n, samples.get(), to.get(), y.get());
                    }
                    const auto count = static_cast<std::size_t>(n);
                    for (auto [values, from] : {std::pair{&found[apart], samples.get()},
                                                {&found_labels[apart], y.get()}}) {
                        values->resize(count);
                        bench.backend.download(values->data(), from, count * sizeof *from);
                    }
                    x[apart] = bench.read(shape, n, to);
                    EpochPlace after;
                    bench.backend.download(&after, place.get(), sizeof after);
                    CHECK((after.epoch == 2 && after.step == 2 && after.arrived == 0));
                }
                CHECK(found[0] == found[1]);
                CHECK(found_labels[0] == found[0]);
                CHECK(found_labels[1] == found[0]);
                CHECK(x[0] == x[1]);
            }
        }
    });
}

TEST_CASE("gather picks, normalises and pads", "[gpu]") {
    on_every_backend([](Bench& bench) {
        for (const Shape& shape : {Shape{3, 5, 7}, Shape{3, 4, 6}}) {
            const int images = 40;
            std::vector<std::uint8_t> pixels(static_cast<std::size_t>(images * shape.elems()));
            std::vector<std::int32_t> labels(images);
            for (std::size_t i = 0; i < pixels.size(); ++i) {
                pixels[i] = static_cast<std::uint8_t>(i * 31 % 256);
            }
            for (int i = 0; i < images; ++i) {
                labels[static_cast<std::size_t>(i)] = i * 3 % 10;
            }
            DeviceBuffer<std::uint8_t> dev_pixels(bench.backend, images * shape.elems());
            bench.backend.upload(dev_pixels.get(), pixels.data(), pixels.size());
            const auto dev_labels = bench.array(labels);
            const Floats scale = {0.5f, 0.25f, 2.0f}, shift = {-1.0f, 0.5f, 3.0f};
            const auto dev_scale = bench.array(scale), dev_shift = bench.array(shift);
            for (const int n : {1, 15, 17, 33}) {
                std::vector<std::int32_t> samples(static_cast<std::size_t>(n));
                Floats expected;
                std::vector<std::int32_t> expected_labels;
                for (int i = 0; i < n; ++i) {
                    const int sample = (i * 7 + 3) % images;
                    samples[static_cast<std::size_t>(i)] = sample;
                    expected_labels.push_back(labels[static_cast<std::size_t>(sample)]);
                    for (std::int64_t e = 0; e < shape.elems(); ++e) {
                        const auto channel = static_cast<std::size_t>(e / shape.plane_elems());
                        expected.push_back(
                            static_cast<float>(
                                pixels[static_cast<std::size_t>(sample * shape.elems() + e)]) *
                                scale[channel] +
                            shift[channel]);
                    }
                }
                const auto dev_samples = bench.array(samples);
                const Guarded x = bench.empty_activation(shape, n);
                DeviceBuffer<std::int32_t> y(bench.backend, n);
                const GatherArgs args{dev_pixels.get(), dev_labels.get(), dev_samples.get(), shape,
                                      dev_scale.get(),  dev_shift.get()};
                bench.backend.gather(args, n, x.get(), y.get());
                CHECK(bench.read(shape, n, x) == expected);
                for (const DataType type : {DataType::bfloat16, DataType::float16}) {
                    INFO(name_of(type));
                    const Floats all = x.download();
                    const TypedValues stored(bench, type, Floats(all.size(), NAN));
                    bench.backend.gather(args, n, stored.tensor(), y.get());
                    CHECK(stored.read() == rounded(type, all));
                }
                std::vector<std::int32_t> found(static_cast<std::size_t>(n));
                bench.backend.download(found.data(), y.get(), y.bytes());
                CHECK(found == expected_labels);
            }
        }
    });
}

TEST_CASE("gradients are added, and converted to 16 bits as the compiler rounds them", "[gpu]") {
    // Every exponent, ties, neighbours of ties, and the ends of both types' ranges.
    Floats values = {0.0f,
                     -0.0f,
                     65504.0f,
                     65519.996f,
                     65520.0f,
                     -65536.0f,
                     0x1p-14f,
                     0x1p-24f,
                     0x1p-25f,
                     0x1.000002p-25f,
                     0x1.8p-24f,
                     std::numeric_limits<float>::max(),
                     std::numeric_limits<float>::min(),
                     std::numeric_limits<float>::denorm_min(),
                     std::numeric_limits<float>::infinity(),
                     -std::numeric_limits<float>::infinity()};
    for (int exponent = -30; exponent < 20; ++exponent) {
        for (const float mantissa :
             {1.0f, 0x1.002p0f, 0x1.002002p0f, 0x1.006p0f, 0x1.01p0f, 0x1.03p0f, 0x1.010002p0f,
              0x1.ffep0f, 0x1.fffp0f, -0x1.234568p0f}) {
            values.push_back(std::ldexp(mantissa, exponent));
        }
    }
    const Floats random = random_floats(100'003, 23);
    values.insert(values.end(), random.begin(), random.end());
    const auto elems = static_cast<std::int64_t>(values.size());
    // C++20 has no bfloat16: take the nearer of the two neighbours, or the even one in a tie.
    const auto nearest_bfloat16 = [](float value) {
        const auto bits = std::bit_cast<std::uint32_t>(value);
        const float below = std::bit_cast<float>(bits & 0xffff0000u);
        const std::uint32_t next = (bits & 0xffff0000u) + 0x10000u;
        const double above = (next & 0x7fffffffu) == 0x7f800000u  // beyond the largest: 2^128
                                 ? std::copysign(0x1p128, value)
                                 : double{std::bit_cast<float>(next)};
        const double to_below = std::abs(double{value} - double{below});
        const double to_above = std::abs(above - double{value});
        const bool down = std::isinf(value) || to_below < to_above ||
                          (to_below == to_above && (bits & 0x10000u) == 0);
        return down ? below : std::bit_cast<float>(next);
    };
    on_every_backend([&](Bench& bench) {
        const Guarded x = bench.vector(values), y = bench.vector(values);
        DeviceBuffer<std::uint16_t> narrow(bench.backend, elems);
        for (const DataType type : {DataType::float16, DataType::bfloat16}) {
            INFO(name_of(type));
            bench.backend.narrow(type, elems, x.get(), narrow.get());
            bench.backend.widen(type, elems, narrow.get(), y.get());
            const Floats found = y.download();
            std::size_t wrong = 0;
            for (std::size_t i = 0; i < values.size(); ++i) {
                const float expected = type == DataType::float16
                                           ? static_cast<float>(static_cast<Half>(values[i]))
                                           : nearest_bfloat16(values[i]);
                wrong += std::bit_cast<std::uint32_t>(found[i]) !=
                         std::bit_cast<std::uint32_t>(expected);
            }
            CHECK(wrong == 0);
        }
        const Guarded nan = bench.vector({std::numeric_limits<float>::quiet_NaN()});
        for (const DataType type : {DataType::float16, DataType::bfloat16}) {
            bench.backend.narrow(type, 1, nan.get(), narrow.get());
            bench.backend.widen(type, 1, narrow.get(), nan.get());
            CHECK(std::isnan(nan.download()[0]));
        }
        const Guarded sum = bench.vector(random);
        bench.backend.add(100'003, bench.vector(random).get(), sum.get());
        const Floats doubled = sum.download();
        CHECK(std::equal(doubled.begin(), doubled.end(), random.begin(),
                         [](float a, float b) { return a == b + b; }));
    });
}

TEST_CASE("transfers concurrent with the computation keep their order", "[gpu]") {
    on_every_backend([](Bench& bench) {
        Backend& backend = bench.backend;
        const int elems = 1000;
        const Shape shape{elems, 1, 1};
        const std::size_t bytes = elems * sizeof(float);
        const PinnedBuffer<float> sent(backend, elems), received(backend, elems);
        const auto received_is = [&](float value) {
            return std::count(received.get(), received.get() + elems, value) == elems;
        };
        const Guarded x = bench.empty(elems);
        std::fill_n(sent.get(), elems, -2.0f);

        // An upload follows the calls before it, even if it is waited for first.
        backend.fill_zero(x.get(), bytes);
        backend.synchronize(backend.upload_async(Device::Stream::copy, x.get(), sent.get(), bytes));
        CHECK(x.download() == Floats(elems, -2.0f));
        // Calls after the device has waited for a transfer see its data.
        backend.wait(backend.upload_async(Device::Stream::copy, x.get(), sent.get(), bytes));
        if (backend.activation_elems(shape, 1) == elems) {  // otherwise x is not an activation
            RunOp(backend, ReluSpec{shape}, 1).forward({.x = x.get(), .y = x.get()});
            // A download sees the calls before it ...
            const auto transfer =
                backend.download_async(Device::Stream::copy, received.get(), x.get(), bytes);
            backend.synchronize(transfer);
            CHECK(received_is(0.0f));
        }
        // ... and one on the compute stream does not see those after it.
        backend.synchronize(backend.upload_async(Device::Stream::copy, x.get(), sent.get(), bytes));
        const auto transfer =
            backend.download_async(Device::Stream::compute, received.get(), x.get(), bytes);
        backend.fill_zero(x.get(), bytes);
        backend.synchronize();
        backend.synchronize(transfer);
        CHECK(received_is(-2.0f));
        CHECK(x.download() == Floats(elems));
    });
}
