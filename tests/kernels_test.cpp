// Every kernel of every backend on this machine against a naive double-precision reference, over
// odd shapes, with poisoned outputs and guarded buffers.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "kernels/backend.hpp"
#include "tests/catch.hpp"
#include "tests/reference.hpp"

using namespace gyre;
using reference::Floats;
using reference::Sums;

namespace {

// Random values in [-1, 1), the same in every run.
Floats random_floats(std::int64_t elems, std::uint32_t stream) {
    const RandomStream random{2026, RandomPurpose::init, stream, 0};
    Floats values(static_cast<std::size_t>(elems));
    for (std::size_t i = 0; i < values.size(); ++i) {
        values[i] = 2.0f * uniform01(random.word(0, static_cast<std::uint32_t>(i))) - 1.0f;
    }
    return values;
}

// Device memory between two guards, poisoned with NaN: what a kernel does not write stays NaN, and
// what it writes outside changes a guard.
class Guarded {
 public:
    Guarded(Guarded&&) = default;
    Guarded(Backend& backend, std::int64_t elems)
        : backend_(backend), elems_(elems), buffer_(backend, elems + 2 * kGuard) {
        std::vector<float> poison(static_cast<std::size_t>(elems + 2 * kGuard),
                                  std::numeric_limits<float>::quiet_NaN());
        std::fill_n(poison.begin(), kGuard, kCanary);
        std::fill_n(poison.end() - kGuard, kGuard, kCanary);
        backend.upload(buffer_.get(), poison.data(), buffer_.bytes());
    }
    ~Guarded() {
        if (buffer_.get() == nullptr) {
            return;  // moved from
        }
        std::vector<float> all(static_cast<std::size_t>(buffer_.elems()));
        backend_.download(all.data(), buffer_.get(), buffer_.bytes());
        for (int i = 0; i < kGuard; ++i) {
            CHECK(all[static_cast<std::size_t>(i)] == kCanary);
            CHECK(all[all.size() - 1 - static_cast<std::size_t>(i)] == kCanary);
        }
    }
    float* get() const { return buffer_.get() + kGuard; }
    Floats download() const {
        Floats values(static_cast<std::size_t>(elems_));
        backend_.download(values.data(), get(), values.size() * sizeof(float));
        return values;
    }

 private:
    static constexpr int kGuard = 64;
    static constexpr float kCanary = 12345.0f;
    Backend& backend_;
    std::int64_t elems_;
    DeviceBuffer<float> buffer_;
};

// One backend and what the tests need around it.
class Bench {
 public:
    explicit Bench(Backend& on) : backend(on) {}

    Guarded vector(const Floats& values) {
        Guarded device(backend, static_cast<std::int64_t>(values.size()));
        backend.upload(device.get(), values.data(), values.size() * sizeof(float));
        return device;
    }
    Guarded empty(std::int64_t elems) { return {backend, elems}; }
    Guarded activation(const Shape& shape, int n, const Floats& values) {
        Guarded device(backend, backend.activation_elems(shape, n));
        backend.import_activation(shape, n, values.data(), device.get());
        return device;
    }
    Guarded empty_activation(const Shape& shape, int n) {
        return {backend, backend.activation_elems(shape, n)};
    }
    Floats read(const Shape& shape, int n, const Guarded& device) {
        Floats values(static_cast<std::size_t>(n * shape.elems()));
        backend.export_activation(shape, n, device.get(), values.data());
        return values;
    }
    DeviceBuffer<std::int32_t> indices(const std::vector<std::int32_t>& values) {
        DeviceBuffer<std::int32_t> device(backend, static_cast<std::int64_t>(values.size()));
        backend.upload(device.get(), values.data(), device.bytes());
        return device;
    }

    Backend& backend;
};

void check_close(const Floats& found, const Sums& expected) {
    REQUIRE(found.size() == expected.value.size());
    std::size_t wrong = 0, first = 0;
    for (std::size_t i = 0; i < found.size(); ++i) {
        // Written so that NaN fails.
        if (!(std::abs(double{found[i]} - expected.value[i]) <= expected.bound(i))) {
            first = wrong++ == 0 ? i : first;
        }
    }
    INFO("first wrong element " << first << ": " << (wrong ? found[first] : 0.0f) << ", expected "
                                << (wrong ? expected.value[first] : 0.0) << " to within "
                                << (wrong ? expected.bound(first) : 0.0));
    CHECK(wrong == 0);
}

double dot(const Floats& a, const Floats& b) {
    double sum = 0.0;
    for (std::size_t i = 0; i < a.size(); ++i) {
        sum += double{a[i]} * double{b[i]};
    }
    return sum;
}

double norm(const Floats& a) {
    return std::sqrt(dot(a, a));
}

// Every backend there is here, each as a section of the test.
template <typename Test>
void on_every_backend(Test test) {
    for (const int threads : {1, 3}) {
        const auto backend = make_cpu_backend(threads);
        INFO("backend: " << backend->description());
        Bench bench(*backend);
        test(bench);
    }
}

const int kBatches[] = {1, 15, 17, 64};

std::string text_of(const Conv2dShape& s, int n) {
    return "conv " + std::to_string(s.in.channels) + "x" + std::to_string(s.in.height) + "x" +
           std::to_string(s.in.width) + " -> " + std::to_string(s.out_channels) + " k" +
           std::to_string(s.kernel) + " s" + std::to_string(s.stride) + " p" +
           std::to_string(s.padding) + ", n = " + std::to_string(n);
}

const Conv2dShape kConvs[] = {
    {{1, 28, 28}, 10, 5, 1, 0},  // net
    {{10, 12, 12}, 20, 5, 1, 0},
    {{3, 7, 9}, 5, 3, 1, 1},  // not square
    {{2, 1, 1}, 3, 1, 1, 0},  // 1 x 1 images
    {{1, 1, 1}, 2, 3, 1, 1},  // all but one window position in the padding
    {{3, 8, 8}, 7, 3, 2, 1},  // strides
    {{2, 9, 7}, 4, 5, 3, 2},
    {{2, 6, 6}, 3, 2, 3, 0},  // stride > kernel: some pixels are never read
    {{2, 5, 5}, 6, 3, 1, 3},  // padding > kernel / 2
    {{1, 4, 5}, 1, 4, 2, 4},  // whole windows in the padding
    {{13, 5, 3}, 23, 3, 1, 1},
    {{4, 6, 6}, 64, 1, 2, 0},
    // 3 x 3 with many channels, which may be computed by Winograd's algorithm
    {{16, 6, 8}, 17, 3, 1, 1},
    {{19, 5, 7}, 16, 3, 1, 0},  // odd extents: half tiles
    {{16, 1, 1}, 16, 3, 1, 1},
    {{33, 3, 4}, 20, 3, 1, 2},
};

bool may_be_winograd(const Conv2dShape& s) {
    return s.kernel == 3 && s.stride == 1 && s.padding <= 2 && s.in.channels >= 16;
}

}  // namespace

TEST_CASE("conv2d matches the reference in all three directions") {
    on_every_backend([](Bench& bench) {
        for (const Conv2dShape& s : kConvs) {
            for (const int n : kBatches) {
                if (n == 64 && s.flop_per_image() > 100'000) {
                    continue;  // 17 images already fill more than one block
                }
                INFO(text_of(s, n));
                const Floats x = random_floats(n * s.in.elems(), 1);
                const Floats w = random_floats(s.weight_elems(), 2);
                const Floats b = random_floats(s.out_channels, 3);
                const Floats dy = random_floats(n * s.out().elems(), 4);
                const Guarded dev_x = bench.activation(s.in, n, x);
                const Guarded dev_dy = bench.activation(s.out(), n, dy);
                const Guarded dev_w = bench.vector(w), dev_b = bench.vector(b);

                const Guarded y = bench.empty_activation(s.out(), n);
                bench.backend.conv2d_forward(s, n, dev_x.get(), dev_w.get(), dev_b.get(), y.get());
                Sums expected_y = reference::conv_forward(s, n, x, w, b);
                Sums expected_dx = reference::conv_backward_data(s, n, dy, w);
                if (may_be_winograd(s)) {
                    const auto weight = [&](int o, int c, int kh, int kw) {
                        return double{w[static_cast<std::size_t>(
                            ((o * s.in.channels + c) * 3 + kh) * 3 + kw)]};
                    };
                    expected_y.other_bound =
                        reference::winograd_bound(s.in, s.out(), s.padding, n, x, weight);
                    expected_dx.other_bound = reference::winograd_bound(
                        s.out(), s.in, 2 - s.padding, n, dy,
                        [&](int c, int o, int kh, int kw) { return weight(o, c, 2 - kh, 2 - kw); });
                }
                check_close(bench.read(s.out(), n, y), expected_y);

                const Guarded dx = bench.empty_activation(s.in, n);
                bench.backend.conv2d_backward_data(s, n, dev_dy.get(), dev_w.get(), dx.get());
                check_close(bench.read(s.in, n, dx), expected_dx);

                const Guarded dw = bench.empty(s.weight_elems()), db = bench.empty(s.out_channels);
                bench.backend.conv2d_backward_weights(s, n, dev_x.get(), dev_dy.get(), dw.get(),
                                                      db.get());
                check_close(dw.download(), reference::conv_backward_weights(s, n, x, dy));
                check_close(db.download(), reference::bias_gradient(s.out(), n, dy));
            }
        }
    });
}

TEST_CASE("linear matches the reference in all three directions") {
    const LinearShape shapes[] = {{320, 50}, {50, 10},  {1, 1},     {1, 63},    {7, 5},
                                  {16, 6},   {65, 129}, {300, 300}, {1030, 11}, {257, 258}};
    on_every_backend([&](Bench& bench) {
        for (const LinearShape& shape : shapes) {
            for (const int n : {1, 15, 17, 64, 100}) {
                INFO("linear " << shape.in_features << " -> " << shape.out_features
                               << ", n = " << n);
                const Conv2dShape s = reference::as_conv(shape);
                const Floats x = random_floats(n * s.in.elems(), 1);
                const Floats w = random_floats(s.weight_elems(), 2);
                const Floats b = random_floats(s.out_channels, 3);
                const Floats dy = random_floats(n * s.out().elems(), 4);
                const Guarded dev_x = bench.activation(s.in, n, x);
                const Guarded dev_dy = bench.activation(s.out(), n, dy);
                const Guarded dev_w = bench.vector(w), dev_b = bench.vector(b);

                const Guarded y = bench.empty_activation(s.out(), n);
                bench.backend.linear_forward(shape, n, dev_x.get(), dev_w.get(), dev_b.get(),
                                             y.get());
                check_close(bench.read(s.out(), n, y), reference::conv_forward(s, n, x, w, b));

                const Guarded dx = bench.empty_activation(s.in, n);
                bench.backend.linear_backward_data(shape, n, dev_dy.get(), dev_w.get(), dx.get());
                check_close(bench.read(s.in, n, dx), reference::conv_backward_data(s, n, dy, w));

                const Guarded dw = bench.empty(s.weight_elems()), db = bench.empty(s.out_channels);
                bench.backend.linear_backward_weights(shape, n, dev_x.get(), dev_dy.get(), dw.get(),
                                                      db.get());
                check_close(dw.download(), reference::conv_backward_weights(s, n, x, dy));
                check_close(db.download(), reference::bias_gradient(s.out(), n, dy));
            }
        }
    });
}

TEST_CASE("gradients of weights are zero for an empty batch") {
    on_every_backend([](Bench& bench) {
        const Conv2dShape conv{{2, 5, 5}, 3, 3, 1, 1};
        const LinearShape linear{20, 9};
        const Guarded x = bench.empty(4096), dy = bench.empty(4096);
        const Guarded dw = bench.empty(conv.weight_elems()), db = bench.empty(3);
        bench.backend.conv2d_backward_weights(conv, 0, x.get(), dy.get(), dw.get(), db.get());
        CHECK(dw.download() == Floats(static_cast<std::size_t>(conv.weight_elems())));
        CHECK(db.download() == Floats(3));
        const Guarded lw = bench.empty(linear.weight_elems()), lb = bench.empty(9);
        bench.backend.linear_backward_weights(linear, 0, x.get(), dy.get(), lw.get(), lb.get());
        CHECK(lw.download() == Floats(static_cast<std::size_t>(linear.weight_elems())));
        CHECK(lb.download() == Floats(9));
    });
}

// Convolution and linear layers are linear in each operand, so the central difference is exact but
// for rounding: <dy, f(x + v) - f(x - v)> / 2 = <dx, v>.
TEST_CASE("conv2d gradients agree with finite differences of the forward kernel") {
    on_every_backend([](Bench& bench) {
        for (const Conv2dShape& s : kConvs) {
            const int n = 17;
            INFO(text_of(s, n));
            const Floats x = random_floats(n * s.in.elems(), 5),
                         w = random_floats(s.weight_elems(), 6);
            const Floats b = random_floats(s.out_channels, 7);
            const Floats dy = random_floats(n * s.out().elems(), 8);
            const auto forward = [&](const Floats& at_x, const Floats& at_w) {
                const Guarded dev_x = bench.activation(s.in, n, at_x);
                const Guarded dev_w = bench.vector(at_w), dev_b = bench.vector(b);
                const Guarded y = bench.empty_activation(s.out(), n);
                bench.backend.conv2d_forward(s, n, dev_x.get(), dev_w.get(), dev_b.get(), y.get());
                return bench.read(s.out(), n, y);
            };
            const auto shifted = [](Floats values, const Floats& v, float sign) {
                for (std::size_t i = 0; i < values.size(); ++i) {
                    values[i] += sign * v[i];
                }
                return values;
            };
            const Guarded dev_dy = bench.activation(s.out(), n, dy);
            const Guarded dev_x = bench.activation(s.in, n, x), dev_w = bench.vector(w);
            const Guarded dx = bench.empty_activation(s.in, n);
            const Guarded dw = bench.empty(s.weight_elems()), db = bench.empty(s.out_channels);
            bench.backend.conv2d_backward_data(s, n, dev_dy.get(), dev_w.get(), dx.get());
            bench.backend.conv2d_backward_weights(s, n, dev_x.get(), dev_dy.get(), dw.get(),
                                                  db.get());
            // Rounding of the outputs: u times their norm, a factor for the sums within.
            const double slack = 64 * 0x1p-24 * norm(dy) * (may_be_winograd(s) ? 4 : 1);
            const Floats vx = random_floats(n * s.in.elems(), 9);
            const Floats up = forward(shifted(x, vx, 1), w), down = forward(shifted(x, vx, -1), w);
            CHECK(std::abs((dot(dy, up) - dot(dy, down)) / 2 - dot(bench.read(s.in, n, dx), vx)) <=
                  slack * (norm(up) + norm(down)));
            const Floats vw = random_floats(s.weight_elems(), 10);
            const Floats more = forward(x, shifted(w, vw, 1)),
                         less = forward(x, shifted(w, vw, -1));
            CHECK(std::abs((dot(dy, more) - dot(dy, less)) / 2 - dot(dw.download(), vw)) <=
                  slack * (norm(more) + norm(less)));
        }
    });
}

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
                    value = std::round(value * 4);  // many ties
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
                DeviceBuffer<std::uint8_t> argmax(bench.backend,
                                                  bench.backend.activation_elems(out, n));
                bench.backend.maxpool2d_forward(s, n, dev_x.get(), y.get(), argmax.get());
                CHECK(bench.read(out, n, y) == expected);
                bench.backend.maxpool2d_backward(s, n, dev_dy.get(), argmax.get(), dx.get());
                check_close(bench.read(s.in, n, dx), expected_dx);
                const Guarded without = bench.empty_activation(out, n);
                bench.backend.maxpool2d_forward(s, n, dev_x.get(), without.get(), nullptr);
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
            bench.backend.maxpool2d_forward({in, 2, 2}, 1, dev_x.get(), y.get(), nullptr);
            CHECK(std::isnan(bench.read(out, 1, y)[0]));
            bench.backend.relu_forward(in, 1, dev_x.get());
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
            bench.backend.relu_forward(shape, n, y.get());
            bench.backend.relu_backward(shape, n, y.get(), dx.get());
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
                for (const int n : kBatches) {
                    const Shape shape{7, 3, 2};
                    std::vector<std::int32_t> samples(static_cast<std::size_t>(n));
                    for (std::size_t i = 0; i < samples.size(); ++i) {
                        samples[i] = static_cast<std::int32_t>((i * 7919 + 13) % 60000);
                    }
                    const RandomStream stream{99, RandomPurpose::dropout, 3, 2};
                    const Floats x = random_floats(n * shape.elems(), 15);
                    Floats expected = x;
                    for (std::size_t i = 0; i < x.size(); ++i) {
                        const auto image = i / static_cast<std::size_t>(shape.elems());
                        const auto elem = i % static_cast<std::size_t>(shape.elems());
                        const auto word =
                            stream.word(static_cast<std::uint32_t>(samples[image]),
                                        static_cast<std::uint32_t>(by_channel ? elem / 6 : elem));
                        expected[i] =
                            word >= double{p} * 0x1p32 ? x[i] * (1.0f / (1.0f - p)) : 0.0f;
                    }
                    const Guarded y = bench.activation(shape, n, x);
                    const auto dev_samples = bench.indices(samples);
                    bench.backend.dropout({stream, dev_samples.get(), shape, p, by_channel}, n,
                                          y.get());
                    CHECK(bench.read(shape, n, y) == expected);
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
        const auto dev_samples = bench.indices(samples);
        const Guarded y = bench.activation(shape, n, Floats(64000, 1.0f));
        bench.backend.dropout(
            {{1, RandomPurpose::dropout, 1, 1}, dev_samples.get(), shape, 0.3f, false}, n, y.get());
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
                    const auto dev_labels = bench.indices(labels);
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
        const auto dev_labels = bench.indices(labels);
        const float scale[] = {0.5f, 0.25f, 2.0f}, shift[] = {-1.0f, 0.5f, 3.0f};
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
            const auto dev_samples = bench.indices(samples);
            const Guarded x = bench.empty_activation(shape, n);
            DeviceBuffer<std::int32_t> y(bench.backend, n);
            bench.backend.gather(
                {dev_pixels.get(), dev_labels.get(), dev_samples.get(), shape, scale, shift}, n,
                x.get(), y.get());
            CHECK(bench.read(shape, n, x) == expected);
            std::vector<std::int32_t> found(static_cast<std::size_t>(n));
            bench.backend.download(found.data(), y.get(), y.bytes());
            CHECK(found == expected_labels);
        }
    });
}

TEST_CASE("optimisers follow PyTorch's formulas over several steps") {
    on_every_backend([](Bench& bench) {
        const std::int64_t elems = 100'003;  // more than one range of the thread pool
        const Floats start = random_floats(elems, 17);
        struct Case {
            const char* name;
            bool adam;
            SgdArgs sgd;
            AdamArgs adam_args;
        };
        const Case cases[] = {
            {"sgd", false, {0.1f, 0.0f, 0.0f, false}, {}},
            {"sgd, weight decay", false, {0.1f, 0.0f, 0.1f, false}, {}},
            {"sgd, momentum", false, {0.1f, 0.9f, 0.0f, false}, {}},
            {"sgd, nesterov, weight decay", false, {0.1f, 0.9f, 0.01f, true}, {}},
            {"adam", true, {}, {0.01f, 0.9f, 0.999f, 1e-8f, 0.0f, false, 0}},
            {"adam, weight decay", true, {}, {0.01f, 0.8f, 0.99f, 1e-6f, 0.1f, false, 0}},
            {"adamw", true, {}, {0.01f, 0.9f, 0.999f, 1e-8f, 0.1f, true, 0}},
        };
        for (const Case& c : cases) {
            INFO(c.name);
            std::vector<double> p(start.begin(), start.end());
            std::vector<double> m(p.size()), v(p.size());
            const Guarded dev_p = bench.vector(start);
            const Guarded dev_m = bench.vector(Floats(p.size())),
                          dev_v = bench.vector(Floats(p.size()));
            const int steps = 4;
            for (int step = 1; step <= steps; ++step) {
                const Floats g = random_floats(elems, 100 + static_cast<std::uint32_t>(step));
                const Guarded dev_g = bench.vector(g);
                AdamArgs adam = c.adam_args;
                adam.step = step;
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
                        p[i] -= double{c.sgd.learning_rate} * move;
                        continue;
                    }
                    const double lr{adam.learning_rate}, b1{adam.beta1}, b2{adam.beta2};
                    const double decay{adam.weight_decay};
                    p[i] *= adam.decoupled_decay ? 1.0 - lr * decay : 1.0;
                    const double d = double{g[i]} + (adam.decoupled_decay ? 0.0 : decay * p[i]);
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
