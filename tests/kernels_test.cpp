// Every other kernel on every backend, against a naive double-precision reference.
#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <numeric>
#include <string>
#include <vector>

#include "kernels/base/philox.hpp"
#include "tests/backends.hpp"
#include "tests/catch.hpp"
#include "tests/run_op.hpp"

using namespace gyre;
using namespace gyre::test;

namespace {

const int kBatches[] = {1, 15, 17, 64};

}  // namespace

TEST_CASE("max-pooling picks the first largest value and returns the gradient to it") {
    const MaxPool2dShape shapes[] = {{{10, 24, 24}, 2, 2}, {{3, 7, 5}, 2, 2}, {{2, 1, 1}, 1, 1},
                                     {{2, 9, 8}, 3, 2},    {{1, 7, 7}, 2, 3}, {{1, 6, 4}, 3, 1}};
    on_every_backend([&](Bench& bench) {
        for (const MaxPool2dShape& s : shapes) {
            for (const int n : kBatches) {
                INFO("pool " << s.in.height << "x" << s.in.width << " k" << s.kernel << " s"
                             << s.stride << ", n = " << n);
                Floats x = random_floats(n * s.in.elems(), 11);
                for (float& value : x) {
                    if (!bench.normwise) {  // libraries do not say which of equals they take
                        value = std::round(value * 4);  // many ties
                    }
                }
                const Shape out = s.out();
                const Floats dy = random_floats(n * out.elems(), 12);
                Floats expected(dy.size());
                Sums expected_dx(n * s.in.elems());
                for (std::size_t i = 0; i < expected.size(); ++i) {
                    const auto at = static_cast<std::int64_t>(i);
                    const std::int64_t plane = at / out.plane_elems();
                    const std::int64_t corner =
                        plane * s.in.plane_elems() +
                        at / out.width % out.height * s.stride * s.in.width +
                        at % out.width * s.stride;
                    std::int64_t best = corner;
                    for (int kh = 0; kh < s.kernel; ++kh) {
                        for (int kw = 0; kw < s.kernel; ++kw) {
                            const std::int64_t here = corner + kh * s.in.width + kw;
                            if (x[static_cast<std::size_t>(here)] >
                                x[static_cast<std::size_t>(best)]) {
                                best = here;
                            }
                        }
                    }
                    expected[i] = x[static_cast<std::size_t>(best)];
                    expected_dx.add(best, double{dy[i]});
                }
                const Guarded dev_x = bench.activation(s.in, n, x);
                const Guarded dev_dy = bench.activation(out, n, dy);
                const Guarded y = bench.empty_activation(out, n);
                const Guarded dx = bench.empty_activation(s.in, n);
                RunOp pool(bench.backend, MaxPool2dSpec{s}, n);
                pool.forward({.x = dev_x.get(), .y = y.get()});
                CHECK(bench.read(out, n, y) == expected);
                pool.backward({.x = dev_x.get(), .dy = dev_dy.get(), .dx = dx.get()});
                bench.check_close(bench.read(s.in, n, dx), expected_dx);
                const Guarded without = bench.empty_activation(out, n);
                pool.batch.training = false;
                pool.forward({.x = dev_x.get(), .y = without.get()});
                CHECK(bench.read(out, n, without) == expected);
            }
        }
    });
}

TEST_CASE("max-pooling and ReLU let NaN through") {
    on_every_backend([](Bench& bench) {
        const Shape in{1, 2, 2}, out{1, 1, 1};
        for (std::size_t where = 0; where < 4; ++where) {
            Floats x = {1, 2, 3, 4};
            x[where] = std::numeric_limits<float>::quiet_NaN();
            const Guarded dev_x = bench.activation(in, 1, x);
            const Guarded y = bench.empty_activation(out, 1);
            RunOp(bench.backend, MaxPool2dSpec{{in, 2, 2}}, 1)
                .forward({.x = dev_x.get(), .y = y.get()});
            CHECK(std::isnan(bench.read(out, 1, y)[0]));
            RunOp(bench.backend, ReluSpec{in}, 1).forward({.x = dev_x.get(), .y = dev_x.get()});
            CHECK(std::isnan(bench.read(in, 1, dev_x)[where]));
        }
    });
}

TEST_CASE("ReLU clips below zero, its gradient where the output is zero") {
    on_every_backend([](Bench& bench) {
        for (const int n : kBatches) {
            const Shape shape{3, 5, 7};
            const Floats x = random_floats(n * shape.elems(), 13);
            const Floats dy = random_floats(n * shape.elems(), 14);
            const Guarded y = bench.activation(shape, n, x), dx = bench.activation(shape, n, dy);
            RunOp relu(bench.backend, ReluSpec{shape}, n);
            relu.forward({.x = y.get(), .y = y.get()});
            relu.backward({.y = y.get(), .dy = dx.get(), .dx = dx.get()});
            Floats expected_y = x, expected_dx = dy;
            for (std::size_t i = 0; i < x.size(); ++i) {
                if (x[i] <= 0.0f) {
                    expected_y[i] = expected_dx[i] = 0.0f;
                }
            }
            CHECK(bench.read(shape, n, y) == expected_y);
            CHECK(bench.read(shape, n, dx) == expected_dx);
        }
    });
}

TEST_CASE("dropout draws its mask from the image's index, wherever the image lies") {
    on_every_backend([](Bench& bench) {
        for (const bool by_channel : {false, true}) {
            for (const float p : {0.0f, 0.25f, 0.5f, 1.0f}) {
                // The second has images and planes of whole vectors of four elements.
                for (const Shape& shape : {Shape{7, 3, 2}, Shape{6, 2, 4}}) {
                    for (const int n : kBatches) {
                        std::vector<std::int32_t> samples(static_cast<std::size_t>(n));
                        for (std::size_t i = 0; i < samples.size(); ++i) {
                            samples[i] = static_cast<std::int32_t>((i * 7919 + 13) % 60000);
                        }
                        const auto plane = static_cast<std::size_t>(shape.plane_elems());
                        const RandomStream stream{99, RandomPurpose::dropout, 3, 2};
                        const Floats x = random_floats(n * shape.elems(), 15);
                        Floats expected = x;
                        for (std::size_t i = 0; i < x.size(); ++i) {
                            const auto image = i / static_cast<std::size_t>(shape.elems());
                            const auto elem = i % static_cast<std::size_t>(shape.elems());
                            const auto word = stream.word(
                                static_cast<std::uint32_t>(samples[image]),
                                static_cast<std::uint32_t>(by_channel ? elem / plane : elem));
                            expected[i] =
                                word >= double{p} * 0x1p32 ? x[i] * (1.0f / (1.0f - p)) : 0.0f;
                        }
                        const Guarded y = bench.activation(shape, n, x);
                        const auto dev_samples = bench.array(samples);
                        const auto dev_epoch =
                            bench.array(std::vector<std::uint32_t>{stream.epoch});
                        RunOp dropout(bench.backend,
                                      DropoutSpec{.in = shape,
                                                  .probability = p,
                                                  .by_channel = by_channel,
                                                  .stream = stream.index},
                                      n);
                        dropout.batch = {.n = n,
                                         .training = true,
                                         .samples = dev_samples.get(),
                                         .seed = stream.seed,
                                         .epoch = dev_epoch.get()};
                        dropout.forward({.x = y.get(), .y = y.get()});
                        CHECK(bench.read(shape, n, y) == expected);
                        const Guarded dx = bench.activation(shape, n, x);
                        dropout.backward({.dy = dx.get(), .dx = dx.get()});
                        CHECK(bench.read(shape, n, dx) == expected);
                    }
                }
            }
        }
    });
}

TEST_CASE("dropout keeps the share of elements that it should") {
    on_every_backend([](Bench& bench) {
        const Shape shape{1000, 1, 1};
        const int n = 64;
        std::vector<std::int32_t> samples(64);
        std::iota(samples.begin(), samples.end(), 0);
        const auto dev_samples = bench.array(samples);
        const Guarded y = bench.activation(shape, n, Floats(64000, 1.0f));
        const DropoutSpec spec{.in = shape, .probability = 0.3f, .stream = 1};
        RunOp dropout(bench.backend, spec, n);
        dropout.batch.samples = dev_samples.get();
        dropout.batch.seed = 1;
        dropout.forward({.x = y.get(), .y = y.get()});
        const Floats values = bench.read(shape, n, y);
        const auto kept = static_cast<double>(
            std::count_if(values.begin(), values.end(), [](float v) { return v != 0.0f; }));
        // Five standard deviations of the binomial distribution.
        CHECK(std::abs(kept / 64000 - 0.7) < 5 * std::sqrt(0.3 * 0.7 / 64000));
    });
}

TEST_CASE("cross entropy: loss, count and gradient match double precision") {
    on_every_backend([](Bench& bench) {
        for (const int classes : {2, 5, 10, 63}) {
            for (const int n : kBatches) {
                for (const float spread : {1.0f, 200.0f}) {  // 200: exp would overflow unshifted
                    INFO(classes << " classes, n = " << n << ", spread " << spread);
                    const Shape shape{classes, 1, 1};
                    Floats logits = random_floats(n * classes, 16);
                    std::vector<std::int32_t> labels(static_cast<std::size_t>(n));
                    const float scale = 1.0f / static_cast<float>(n + 3);
                    double loss = 0.0;
                    int correct = 0;
                    std::vector<double> gradient;
                    for (int i = 0; i < n; ++i) {
                        float* row = &logits[static_cast<std::size_t>(i * classes)];
                        std::transform(row, row + classes, row,
                                       [&](float v) { return v * spread; });
                        const int label = (i * 5 + 1) % classes;
                        labels[static_cast<std::size_t>(i)] = label;
                        const auto best = std::max_element(row, row + classes) - row;
                        correct += best == label;
                        double sum = 0.0;
                        for (int k = 0; k < classes; ++k) {
                            sum += std::exp(double{row[k]} - double{row[best]});
                        }
                        loss += std::log(sum) + double{row[best]} - double{row[label]};
                        for (int k = 0; k < classes; ++k) {
                            const double p = std::exp(double{row[k]} - double{row[best]}) / sum;
                            gradient.push_back(double{scale} * (p - (k == label ? 1.0 : 0.0)));
                        }
                    }
                    const Guarded dev_logits = bench.activation(shape, n, logits);
                    const Guarded dev_gradient = bench.empty_activation(shape, n);
                    const Guarded sums = bench.empty(2);
                    const auto dev_labels = bench.array(labels);
                    bench.backend.cross_entropy({classes, dev_logits.get(), dev_labels.get(), scale,
                                                 dev_gradient.get(), sums.get()},
                                                n);
                    const Floats found = sums.download();
                    // A few roundings for exp, sum, log and their differences.
                    const double eps = 0x1p-24 * (classes + 16);
                    CHECK(std::abs(double{found[0]} - loss * double{scale}) <=
                          eps * double{scale} * n * double{spread + 4.0f});
                    CHECK(found[1] == static_cast<float>(correct));
                    const Floats g = bench.read(shape, n, dev_gradient);
                    double worst = 0.0;
                    for (std::size_t i = 0; i < g.size(); ++i) {
                        const double error = std::abs(double{g[i]} - gradient[i]);
                        worst = error <= worst ? worst : error;
                    }
                    CHECK(worst <= eps * double{scale});
                    // Without a gradient, and lanes beyond the batch get none.
                    bench.backend.cross_entropy(
                        {classes, dev_logits.get(), dev_labels.get(), scale, nullptr, sums.get()},
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

TEST_CASE("of several largest logits the first counts as the answer") {
    on_every_backend([](Bench& bench) {
        const int classes = 5, n = 10;
        Floats logits(n * classes, -1.0f);
        std::vector<std::int32_t> labels;
        for (int i = 0; i < n; ++i) {  // classes 1 and 3 alike
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

TEST_CASE("gather picks, normalises and pads") {
    on_every_backend([](Bench& bench) {
        const Shape shape{3, 5, 7};
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
            bench.backend.gather({dev_pixels.get(), dev_labels.get(), dev_samples.get(), shape,
                                  dev_scale.get(), dev_shift.get()},
                                 n, x.get(), y.get());
            CHECK(bench.read(shape, n, x) == expected);
            std::vector<std::int32_t> found(static_cast<std::size_t>(n));
            bench.backend.download(found.data(), y.get(), y.bytes());
            CHECK(found == expected_labels);
        }
    });
}

TEST_CASE("gradients are clipped to a norm") {
    on_every_backend([](Bench& bench) {
        for (const std::int64_t elems : {1, 31, 100'003}) {
            const Floats g = random_floats(elems, 18);
            const double length = norm(g);
            for (const double most : {0.0, 0.5 * length, 2.0 * length}) {
                const Guarded dev_g = bench.vector(g);
                bench.backend.clip_norm(elems, static_cast<float>(most), dev_g.get(), {});
                const Floats found = dev_g.download();
                const double factor =
                    std::min(1.0, double{static_cast<float>(most)} / (length + 1e-6));
                double worst = 0.0;
                for (std::size_t i = 0; i < g.size(); ++i) {
                    worst = std::max(worst, std::abs(double{found[i]} - factor * double{g[i]}));
                }
                // The factor and the product are rounded; the norm is summed in double.
                CHECK(worst <= 2 * 0x1p-24);
            }
        }
        const Guarded bad = bench.vector({1.0f, std::numeric_limits<float>::quiet_NaN()});
        bench.backend.clip_norm(2, 1.0f, bad.get(), {});
        CHECK(std::isnan(bad.download()[0]));
    });
}

TEST_CASE("gradients are added, and travel in 16 bits as the compiler rounds them") {
    // Every exponent, ties, neighbours of ties, the ends of both types' ranges.
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
    // bfloat16 has no type in C++20: the nearest of the two neighbours, the even one in a tie.
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
                                           ? static_cast<float>(static_cast<_Float16>(values[i]))
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

TEST_CASE("a gradient that is not finite is reported, the last of several") {
    on_every_backend([](Bench& bench) {
        constexpr std::int64_t kElems = 70'003;
        const auto check = [&](std::vector<std::int64_t> bad, float value, std::int32_t expected) {
            Floats g(kElems, 1e38f);  // finite, even where several are added
            for (const std::int64_t i : bad) {
                g[static_cast<std::size_t>(i)] = value;
            }
            const Guarded dev_g = bench.vector(g);
            const Guarded p = bench.vector(Floats(kElems)), m = bench.vector(Floats(kElems)),
                          v = bench.vector(Floats(kElems));
            for (int kernel = 0; kernel < 4; ++kernel) {
                INFO("kernel " << kernel);
                const auto word = bench.array(std::vector<std::int32_t>(1));
                const FiniteCheck finite{word.get(), 160};
                const DeviceBuffer<StepScalars> scalars(bench.backend, 1);
                const SgdArgs sgd = {.scalars = scalars.get(), .finite = finite};
                const AdamArgs adam = {.scalars = scalars.get(), .finite = finite};
                if (kernel == 0) {
                    bench.backend.sgd_step(sgd, kElems, p.get(), dev_g.get(), nullptr);
                } else if (kernel == 1) {
                    bench.backend.sgd_step(sgd, kElems, p.get(), dev_g.get(), m.get());
                } else if (kernel == 2) {
                    bench.backend.adam_step(adam, kElems, p.get(), dev_g.get(), m.get(), v.get());
                } else {
                    bench.backend.clip_norm(kElems, 1.0f, dev_g.get(), finite);
                }
                std::int32_t found = -1;
                bench.backend.download(&found, word.get(), sizeof found);
                CHECK(found == expected);
            }
        };
        const float nan = std::numeric_limits<float>::quiet_NaN();
        const float infinity = std::numeric_limits<float>::infinity();
        check({}, nan, 0);
        check({0}, nan, 11);  // 1 + 160 / 16
        check({15, 16}, -infinity, 12);
        check({3, 40'000, 20'000}, infinity, 1 + (160 + 40'000) / 16);
        check({kElems - 1}, nan, 1 + (160 + kElems - 1) / 16);
    });
}

TEST_CASE("optimisers follow PyTorch's formulas over several steps") {
    on_every_backend([](Bench& bench) {
        const std::int64_t elems = 100'003;  // more than one range of the thread pool
        const Floats start = random_floats(elems, 17);
        const auto scalars = bench.array(std::vector<StepScalars>(1));
        struct Case {
            const char* name;
            float rate;
            bool adam;
            SgdArgs sgd;
            AdamArgs adam_args;
            float decoupled_decay = 0.0f;
        };
        const StepScalars* const at = scalars.get();
        const Case cases[] = {
            {"sgd", 0.1f, false, {.scalars = at}, {}},
            {"sgd, weight decay", 0.1f, false, {.scalars = at, .weight_decay = 0.1f}, {}},
            {"sgd, momentum", 0.1f, false, {.scalars = at, .momentum = 0.9f}, {}},
            {"sgd, nesterov, weight decay",
             0.1f,
             false,
             {.scalars = at, .momentum = 0.9f, .weight_decay = 0.01f, .nesterov = true},
             {}},
            {"adam", 0.01f, true, {}, {.scalars = at}},
            {"adam, weight decay",
             0.01f,
             true,
             {},
             {.scalars = at,
              .beta1 = 0.8f,
              .beta2 = 0.99f,
              .epsilon = 1e-6f,
              .weight_decay = 0.1f}},
            {"adamw", 0.01f, true, {}, {.scalars = at}, 0.1f},
        };
        for (const Case& c : cases) {
            INFO(c.name);
            std::vector<double> p(start.begin(), start.end());
            std::vector<double> m(p.size()), v(p.size());
            const Guarded dev_p = bench.vector(start);
            const Guarded dev_m = bench.vector(Floats(p.size())),
                          dev_v = bench.vector(Floats(p.size()));
            const AdamArgs& adam = c.adam_args;
            const double lr{c.rate}, b1{adam.beta1}, b2{adam.beta2};
            const int steps = 4;
            for (int step = 1; step <= steps; ++step) {
                const Floats g = random_floats(elems, 100 + static_cast<std::uint32_t>(step));
                const Guarded dev_g = bench.vector(g);
                const StepScalars now = {
                    .learning_rate = c.rate,
                    .adam_step_size = static_cast<float>(lr / (1 - std::pow(b1, step))),
                    .adam_correction = static_cast<float>(1 / std::sqrt(1 - std::pow(b2, step))),
                    .adam_shrink = static_cast<float>(1 - lr * double{c.decoupled_decay})};
                bench.backend.upload(scalars.get(), &now, sizeof now);
                if (c.adam) {
                    bench.backend.adam_step(adam, elems, dev_p.get(), dev_g.get(), dev_m.get(),
                                            dev_v.get());
                } else {
                    bench.backend.sgd_step(c.sgd, elems, dev_p.get(), dev_g.get(),
                                           c.sgd.momentum > 0 ? dev_m.get() : nullptr);
                }
                for (std::size_t i = 0; i < p.size(); ++i) {
                    if (!c.adam) {
                        const double d = double{g[i]} + double{c.sgd.weight_decay} * p[i];
                        m[i] = double{c.sgd.momentum} * m[i] + d;
                        const double move =
                            c.sgd.nesterov ? d + double{c.sgd.momentum} * m[i] : m[i];
                        p[i] -= lr * move;
                        continue;
                    }
                    p[i] *= 1.0 - lr * double{c.decoupled_decay};
                    const double d = double{g[i]} + double{adam.weight_decay} * p[i];
                    m[i] = b1 * m[i] + (1 - b1) * d;
                    v[i] = b2 * v[i] + (1 - b2) * d * d;
                    const double denominator =
                        std::sqrt(v[i] / (1 - std::pow(b2, step))) + double{adam.epsilon};
                    p[i] -= lr / (1 - std::pow(b1, step)) * m[i] / denominator;
                }
            }
            const Floats found = dev_p.download();
            double worst = 0.0;
            for (std::size_t i = 0; i < p.size(); ++i) {
                const double error = std::abs(double{found[i]} - p[i]);
                worst = error <= worst ? worst : error;
            }
            // Values of order 1 to 2, a few roundings a step; where Adam's moments are tiny their
            // ratio is less exact, which lr = 0.01 scales down.
            CHECK(worst <= steps * 16 * 0x1p-24);
        }
    });
}

TEST_CASE("transfers beside the computation keep their place in it") {
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

        // An upload comes after the calls before it, even if it is waited for first.
        backend.fill_zero(x.get(), bytes);
        backend.synchronize(backend.upload_async(Device::Stream::copy, x.get(), sent.get(), bytes));
        CHECK(x.download() == Floats(elems, -2.0f));
        // The calls after one that the device has waited for see its data.
        backend.wait(backend.upload_async(Device::Stream::copy, x.get(), sent.get(), bytes));
        if (backend.activation_elems(shape, 1) == elems) {  // else x is no activation
            RunOp(backend, ReluSpec{shape}, 1).forward({.x = x.get(), .y = x.get()});
            // A download sees the calls before it ...
            const auto transfer =
                backend.download_async(Device::Stream::copy, received.get(), x.get(), bytes);
            backend.synchronize(transfer);
            CHECK(received_is(0.0f));
        }
        // ... and one in order not those after it.
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
