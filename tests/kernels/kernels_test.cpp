// Max-pooling, activations and dropout on every backend, against a naive double-precision
// reference. Other operations are in products_test.cpp, norm_test.cpp and join_pool_test.cpp.
#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

#include "base/philox.hpp"
#include "tests/kernels/run_op.hpp"
#include "tests/support/backends.hpp"
#include "tests/support/catch.hpp"

using namespace gyre;
using namespace gyre::test;

namespace {

const int kBatches[] = {1, 15, 17, 64};

}  // namespace

TEST_CASE("max-pooling picks the first maximum and routes the gradient to it", "[gpu]") {
    const MaxPool2dShape shapes[] = {{{10, 24, 24}, 2, 2},
                                     {{3, 7, 5}, 2, 2},
                                     {{2, 1, 1}, 1, 1},
                                     {{2, 9, 8}, 3, 2},
                                     {{1, 7, 7}, 2, 3},
                                     {{1, 6, 4}, 3, 1},
                                     {{3, 8, 9}, 3, 2, 1},
                                     {{2, 6, 4}, 2, 2, 1},
                                     {{1, 6, 4}, 3, 1, 1},
                                     {{2, 7, 6}, 5, 3, 2},
                                     {{1, 1, 1}, 3, 2, 1},
                                     {{1, 5, 4}, 3, 3, 1},
                                     // Rounded up: in both directions, in one, with padding, and
                                     // where the last window would begin in the padding.
                                     {{2, 8, 6}, 3, 2, 0, true},
                                     {{1, 7, 8}, 3, 2, 0, true},
                                     {{2, 5, 7}, 2, 2, 0, true},
                                     {{1, 6, 8}, 3, 2, 1, true},
                                     {{1, 4, 7}, 2, 3, 1, true},
                                     {{3, 9, 9}, 4, 3, 2, true}};
    on_every_backend([&](Bench& bench) {
        for (const MaxPool2dShape& s : shapes) {
            for (const int n : kBatches) {
                INFO("pool " << s.in.height << "x" << s.in.width << " k" << s.kernel << " s"
                             << s.stride << " p" << s.padding << (s.ceil ? " ceil" : "")
                             << ", n = " << n);
                Floats x = random_floats(n * s.in.elems(), 11);
                for (float& value : x) {
                    if (!bench.normwise) {  // libraries do not say which of equal values they take
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
                    const std::int64_t top = at / out.width % out.height * s.stride - s.padding;
                    const std::int64_t left = at % out.width * s.stride - s.padding;
                    std::int64_t best = -1;
                    for (std::int64_t h = top; h < top + s.kernel; ++h) {
                        for (std::int64_t w = left; w < left + s.kernel; ++w) {
                            if (h < 0 || h >= s.in.height || w < 0 || w >= s.in.width) {
                                continue;
                            }
                            const std::int64_t here =
                                plane * s.in.plane_elems() + h * s.in.width + w;
                            if (best < 0 || x[static_cast<std::size_t>(here)] >
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

TEST_CASE("max-pooling, ReLU and other activations propagate NaN", "[gpu]") {
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
            for (const Activation function :
                 {Activation::gelu, Activation::silu, Activation::leaky_relu, Activation::relu6,
                  Activation::sigmoid, Activation::hardsigmoid, Activation::hardswish}) {
                const Guarded at = bench.activation(in, 1, x), to = bench.empty_activation(in, 1);
                RunOp op(bench.backend, ActivationSpec{in, function}, 1);
                const Guarded& result = op.needs().in_place ? at : to;
                op.forward({.x = at.get(), .y = result.get()});
                CHECK(std::isnan(bench.read(in, 1, result)[where]));
            }
        }
    });
}

TEST_CASE("ReLU clips below zero, and its gradient is zero where the output is", "[gpu]") {
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

TEST_CASE("activations and their gradients are the formulas of PyTorch's modules", "[gpu]") {
    const Shape shape{3, 5, 7};
    const ActivationSpec specs[] = {{shape, Activation::gelu},
                                    {shape, Activation::silu},
                                    {shape, Activation::leaky_relu, 0.25f},
                                    {shape, Activation::leaky_relu, 2.0f},
                                    {shape, Activation::relu6},
                                    {shape, Activation::sigmoid},
                                    {shape, Activation::hardsigmoid},
                                    {shape, Activation::hardswish}};
    on_every_backend([&](Bench& bench) {
        for (const ActivationSpec& spec : specs) {
            for (const int n : kBatches) {
                INFO("function " << static_cast<int>(spec.function) << ", n = " << n);
                Floats x = random_floats(n * shape.elems(), 16);
                for (float& value : x) {
                    value *= 6.0f;
                }
                const Floats edges = {0.0f,  -0.0f,  1e-30f, -1e-30f, 0.75f,   -0.75f,
                                      13.0f, -13.0f, 30.0f,  -30.0f,  1000.0f, -1000.0f,
                                      3.0f,  -3.0f,  6.0f,   -6.0f};
                std::copy(edges.begin(), edges.end(), x.begin() + 2);
                const Floats dy = random_floats(n * shape.elems(), 17);
                RunOp op(bench.backend, spec, n);
                const bool in_place = op.needs().in_place;
                const Guarded from = bench.activation(shape, n, x);
                const Guarded to = bench.empty_activation(shape, n);
                const Guarded gradient = bench.activation(shape, n, dy);
                const Guarded result = bench.empty_activation(shape, n);
                float* const y = in_place ? from.get() : to.get();
                float* const dx = in_place ? gradient.get() : result.get();
                op.forward({.x = from.get(), .y = y});
                const Floats found = bench.read(shape, n, in_place ? from : to);
                op.backward({.x = from.get(), .y = y, .dy = gradient.get(), .dx = dx});
                const Floats found_dx = bench.read(shape, n, in_place ? gradient : result);
                for (std::size_t i = 0; i < x.size(); ++i) {
                    const auto expected = reference::activated(spec, double{x[i]});
                    const double rounding = Sums::rounding(expected.roundings + 1);
                    // Powers below e^-87 count as that.
                    const double least = 0x1.2p-126 * 1.25 * (1.0 + std::abs(double{x[i]}));
                    INFO("x = " << x[i]);
                    CHECK(std::abs(double{found[i]} - expected.value) <=
                          rounding * std::abs(expected.value) + least);
                    CHECK(std::abs(double{found_dx[i]} - double{dy[i]} * expected.derivative) <=
                          std::abs(double{dy[i]}) * rounding * expected.derivative_magnitude +
                              least);
                }
            }
        }
    });
}

TEST_CASE("dropout draws its mask from the image's index, not its position in the batch", "[gpu]") {
    on_every_backend([](Bench& bench) {
        for (const bool by_channel : {false, true}) {
            for (const float p : {0.0f, 0.25f, 0.5f, 1.0f}) {
                // The second shape has images and planes that are multiples of four elements.
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

TEST_CASE("dropout keeps the expected share of elements", "[gpu]") {
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

TEST_CASE("some channels of a value are taken in an order, and their gradients put back", "[gpu]") {
    on_every_backend([](Bench& bench) {
        const Shape shape{6, 5, 3};
        struct Case {
            ChannelsSpec spec;
            std::vector<int> sources;  // of the channels of y
        };
        const Case cases[] = {{{shape, 0, 2}, {0, 1}},
                              {{shape, 4, 2}, {4, 5}},
                              {{shape, 0, 6}, {0, 1, 2, 3, 4, 5}},
                              {{shape, 0, 6, 2}, {0, 3, 1, 4, 2, 5}},
                              {{shape, 0, 6, 3}, {0, 2, 4, 1, 3, 5}},
                              {{shape, 0, 6, 6}, {0, 1, 2, 3, 4, 5}}};
        const std::int64_t plane = shape.plane_elems();
        for (const auto& [spec, sources] : cases) {
            for (const int n : {0, 1, 17, 33}) {
                INFO("from " << spec.first << ", " << spec.count << " in " << spec.groups
                             << " groups, n = " << n);
                const Floats x = random_floats(n * shape.elems(), 41);
                Floats y, expected_dx(x.size());
                const Floats dy = random_floats(n * spec.out().elems(), 42);
                for (std::int64_t image = 0; image < n; ++image) {
                    for (std::size_t c = 0; c < sources.size(); ++c) {
                        const std::int64_t from = (image * shape.channels + sources[c]) * plane;
                        std::copy_n(dy.begin() + std::ssize(y), plane, expected_dx.begin() + from);
                        y.insert(y.end(), x.begin() + from, x.begin() + from + plane);
                    }
                }
                const Guarded dev_x = bench.activation(shape, n, x);
                const Guarded dev_dy = bench.activation(spec.out(), n, dy);
                const Guarded dev_y = bench.empty_activation(spec.out(), n);
                const Guarded dx = bench.empty_activation(shape, n);
                RunOp op(bench.backend, spec, std::max(n, 1));
                op.batch.n = n;
                op.forward({.x = dev_x.get(), .y = dev_y.get()});
                CHECK(bench.read(spec.out(), n, dev_y) == y);
                op.backward({.dy = dev_dy.get(), .dx = dx.get()});
                CHECK(bench.read(shape, n, dx) == expected_dx);
            }
        }
    });
}
