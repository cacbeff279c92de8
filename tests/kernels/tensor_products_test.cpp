// TF32 products on tensor cores: convolutions and linear layers of the shapes that the main loop
// supports, separate and fused, on the emulated GPU under several schedules, and on a GPU.
#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <numeric>
#include <utility>
#include <vector>

#include "model/net.hpp"
#include "tests/kernels/chains.hpp"
#include "tests/kernels/directions.hpp"
#include "tests/support/backends.hpp"
#include "tests/support/catch.hpp"

using namespace gyre;
using namespace gyre::test;

namespace {

struct ConvCase {
    Conv2dShape shape;
    int n;
};
const ConvCase kConvs[] = {
    {{{16, 6, 8}, 20, 3, 1, 1}, 3},
    {{{20, 5, 7}, 16, 3, 1, 0}, 2},    // a slice of k ends in the middle of a tap
    {{{16, 1, 1}, 16, 3, 1, 1}, 5},    // all taps but one are in the padding
    {{{36, 3, 4}, 20, 3, 1, 2}, 1},    // padding > kernel / 2
    {{{16, 9, 5}, 24, 5, 1, 2}, 2},    // 25 taps
    {{{64, 5, 6}, 132, 3, 1, 1}, 2},   // k is divided; several tiles of n
    {{{132, 3, 3}, 68, 1, 1, 0}, 9},   // several tiles of m and n
    {{{16, 14, 13}, 16, 3, 1, 1}, 6},  // dw: k is divided
};

const LinearShape kLinears[] = {{32, 36}, {300, 300}, {1036, 68}, {68, 260}};

}  // namespace

TEST_CASE("convolutions on tensor cores match the reference in all three directions", "[gpu]") {
    on_tensor_cores([](Bench& bench) {
        for (const ConvCase& c : kConvs) {
            INFO(text_of(c.shape, c.n));
            check_directions(bench, Conv2dSpec{.shape = c.shape}, c.shape, c.n);
        }
    });
}

TEST_CASE("linear layers on tensor cores match the reference in all three directions", "[gpu]") {
    on_tensor_cores([](Bench& bench) {
        for (const LinearShape& s : kLinears) {
            for (const int n : {1, 67, 130}) {
                INFO("linear " << s.in_features << " -> " << s.out_features << ", n = " << n);
                const LinearSpec spec{.in = {s.in_features, 1, 1}, .shape = s};
                check_directions(bench, spec, reference::as_conv(s), n);
            }
        }
        const LinearShape s{32, 36};  // dw: images are divided
        check_directions(bench, LinearSpec{.in = {32, 1, 1}, .shape = s}, reference::as_conv(s),
                         1040);
    });
}

// Numbers of a few bits: all sums are exact in any order, and many are equal.
TEST_CASE("convolutions and linear layers fused on tensor cores equal their parts", "[gpu]") {
    on_tensor_cores([&](Bench& bench) {
        const auto exact = make_emulated_backend({});  // unlike the CPU's Winograd filtering
        Bench parts_bench(*exact);
        const auto check = [&](const OpSpec& fused, const std::vector<OpSpec>& parts,
                               Operands operands) {
            for (Floats* values : {&operands.x, &operands.w, &operands.b, &operands.dy}) {
                for (float& value : *values) {
                    value = std::round(value * 2);
                }
            }
            const Results expected = run_chain(parts_bench, parts, operands);
            const Results found = run_chain(bench, {fused}, operands);
            check_equal(found.evaluated, expected.evaluated);
            check_equal(found.y, expected.y);
            check_equal(found.dw, expected.dw);
            check_equal(found.db, expected.db);
            check_equal(found.dx, expected.dx);
        };
        for (const Conv2dShape& shape : {Conv2dShape{{16, 6, 8}, 20, 3, 1, 1},
                                         {{64, 7, 5}, 36, 3, 1, 1},
                                         {{20, 6, 9}, 132, 3, 1, 0}}) {
            for (const int pool : {0, 2}) {
                for (const bool relu : {false, true}) {
                    for (const int n : {0, 1, 5}) {
                        const Conv2dSpec spec{
                            .shape = shape, .pool_kernel = pool, .pool_stride = pool, .relu = relu};
                        INFO(text_of(shape, n) << ", pool " << pool << ", relu " << relu);
                        check(spec, parts_of(spec),
                              random_operands(n, shape.in, spec.out(), shape.weight_elems(),
                                              shape.out_channels));
                    }
                }
            }
        }
        for (const LinearShape& shape : {LinearShape{32, 36}, {1036, 68}}) {
            for (const int n : {0, 1, 70}) {
                const LinearSpec parts{.in = {shape.in_features, 1, 1}, .shape = shape};
                LinearSpec fused = parts;
                fused.relu = true;
                const Operands operands = random_operands(n, parts.in, parts.out(),
                                                          shape.weight_elems(), shape.out_features);
                check(fused, {parts, ReluSpec{parts.out()}}, operands);
                fused.dropout = 0.5f;
                fused.dropout_stream = 5;
                check(fused,
                      {parts, ReluSpec{parts.out()},
                       DropoutSpec{.in = parts.out(), .probability = 0.5f, .stream = 5}},
                      operands);
            }
        }
    });
}

TEST_CASE("linear layers that exchange gradients before a ReLU compute the same as separately",
          "[gpu]") {
    on_tensor_cores([](Bench& bench) {
        for (const LinearShape& shape : {LinearShape{68, 260}, {1036, 10}}) {
            for (const int n : {1, 70}) {
                INFO("linear " << shape.in_features << " -> " << shape.out_features << ", n " << n);
                const Shape in{shape.in_features, 1, 1};
                LinearSpec spec{.in = in, .shape = shape};
                Operands on =
                    random_operands(n, in, spec.out(), shape.weight_elems(), shape.out_features);
                const auto dx_of = [&](const LinearSpec& each) {
                    RunOp op(bench.backend, each, n);
                    const Guarded x = bench.vector(on.x), dy = bench.vector(on.dy);
                    const Guarded w = bench.vector(on.w);
                    const Guarded dx = bench.empty(n * in.elems());
                    op.backward(
                        {.x = x.get(), .dy = dy.get(), .dx = dx.get(), .params = {w.get(), {}}});
                    return dx.download();
                };
                Floats expected = dx_of(spec);
                for (std::size_t i = 0; i < expected.size(); ++i) {
                    expected[i] = on.x[i] > 0.0f ? expected[i] * 1.25f : 0.0f;
                }
                spec.dx_factor = 1.25f;
                check_equal(dx_of(spec), expected);
                if (shape.out_features > 32) {  // dy that is already masked stays unchanged
                    spec.relu = spec.dy_masked = true;
                    spec.dropout = 0.2f;
                    check_equal(dx_of(spec), expected);
                }
            }
        }
    });
}

// Truncation to TF32 instead of rounding would give each operand an error of almost 2^-10.
TEST_CASE("operands of tensor cores are rounded to nearest", "[gpu]") {
    on_tensor_cores([](Bench& bench) {
        const auto check = [&](const OpSpec& spec, const Conv2dShape& s) {
            const int n = 3;
            const Floats x(static_cast<std::size_t>(n * s.in.elems()), 1.0f + 0x1p-10f - 0x1p-23f);
            const Floats w(static_cast<std::size_t>(s.weight_elems()), 1.0f + 0x1p-10f - 0x1p-23f);
            const Floats b(static_cast<std::size_t>(s.out_channels));
            const Floats dy(static_cast<std::size_t>(n * s.out().elems()),
                            -1.0f - 0x1p-10f + 0x1p-23f);
            check_directions(bench, spec, s, {n, x, w, b, dy});
        };
        const LinearShape linear{64, 36};
        check(LinearSpec{.in = {64, 1, 1}, .shape = linear}, reference::as_conv(linear));
        const Conv2dShape conv{{16, 4, 5}, 16, 3, 1, 1};
        check(Conv2dSpec{.shape = conv}, conv);
    });
}

TEST_CASE("tensor cores propagate NaN and infinity", "[gpu]") {
    const float nans[] = {std::numeric_limits<float>::quiet_NaN(),
                          std::bit_cast<float>(0x7fffffffu),  // as produced by a GPU
                          std::bit_cast<float>(0xffc00000u)};
    on_tensor_cores([&](Bench& bench) {
        const auto y_of = [&](const OpSpec& spec, const Shape& in, const Shape& out,
                              std::int64_t weights, float value, bool in_x) {
            const int n = 2;
            Floats x(static_cast<std::size_t>(n * in.elems()), 1.0f);
            Floats w(static_cast<std::size_t>(weights), 1.0f);
            (in_x ? x[0] : w[4]) = value;  // the middle tap, which is never in the padding
            const Guarded dev_x = bench.activation(in, n, x), dev_w = bench.vector(w);
            const Guarded dev_b = bench.vector(Floats(static_cast<std::size_t>(out.channels)));
            const Guarded y = bench.empty_activation(out, n);
            RunOp op(bench.backend, spec, n);
            op.forward({.x = dev_x.get(), .y = y.get(), .params = {dev_w.get(), dev_b.get()}});
            return bench.read(out, n, y)[0];
        };
        for (const bool in_x : {false, true}) {
            for (const float value :
                 {nans[0], nans[1], nans[2], std::numeric_limits<float>::infinity()}) {
                const LinearSpec linear{.in = {32, 1, 1}, .shape = {32, 36}, .relu = true};
                Conv2dSpec conv{.shape = {{16, 4, 4}, 16, 3, 1, 1}, .relu = true};
                const auto is_same = [&](float y) {
                    return std::isnan(value) ? std::isnan(y) : std::isinf(y) && y > 0;
                };
                CHECK(is_same(y_of(linear, linear.in, linear.out(), linear.shape.weight_elems(),
                                   value, in_x)));
                conv.pool_kernel = conv.pool_stride = 2;
                CHECK(is_same(
                    y_of(conv, conv.shape.in, conv.out(), conv.shape.weight_elems(), value, in_x)));
            }
        }
    });
}

namespace {

// Converts [n][channels][plane] to [n][plane][channels], with zeros where y is not positive.
Floats masked_channels_last(const Shape& shape, const Floats& values, const Floats& y) {
    Floats last(values.size());
    const auto plane = static_cast<std::size_t>(shape.plane_elems());
    const auto channels = static_cast<std::size_t>(shape.channels);
    for (std::size_t i = 0; i < values.size(); ++i) {
        const std::size_t image = i / plane / channels, channel = i / plane % channels;
        last[(image * plane + i % plane) * channels + channel] = y[i] > 0.0f ? values[i] : 0.0f;
    }
    return last;
}

struct Passes {
    std::vector<float> sums, evaluated, gradients;
};
Passes run_net(Backend& backend, model::Net& net, int n) {
    const Shape& in = net.input_shape();
    const Floats x = random_floats(n * in.elems(), 40);
    backend.import_activation(in, n, x.data(), net.input().f32());
    std::vector<std::int32_t> labels(static_cast<std::size_t>(n));
    std::iota(labels.begin(), labels.end(), 0);
    std::for_each(labels.begin(), labels.end(), [](std::int32_t& label) { label %= 5; });
    backend.upload(net.labels(), labels.data(), labels.size() * sizeof(std::int32_t));
    const DeviceBuffer<std::int32_t> samples(backend, n);
    backend.upload(samples.get(), labels.data(), samples.bytes());
    const DeviceBuffer<float> device_sums(backend, 2);
    const auto download = [&](const float* from, std::int64_t elems) {
        std::vector<float> values(static_cast<std::size_t>(elems));
        backend.download(values.data(), from, values.size() * sizeof(float));
        return values;
    };
    Batch batch{.n = n, .training = true, .samples = samples.get(), .seed = 3};
    Passes passes;
    net.forward(batch);
    net.loss(batch, 1.0f, device_sums.get());
    passes.sums = download(device_sums.get(), 2);
    net.backward(batch);
    passes.gradients = download(net.gradient_data(), net.flat_elems());
    batch.training = false;
    net.forward(batch);
    net.loss(batch, 1.0f, device_sums.get());
    passes.evaluated = download(device_sums.get(), 2);
    return passes;
}

constexpr const char* kChain =
    "conv 16 k3 p1\nrelu\nconv 20 k3 p1\nrelu\nconv 36 k3\nrelu\nmaxpool 2\n"
    "linear 36\nrelu\ndropout 0.5\nlinear classes\n";

model::Net chain_net(Backend& backend, const Shape& in, int n, bool fuse) {
    model::NetOptions options{.train_batch = n, .eval_batch = n};
    options.spec.fuse = fuse;
    model::Net net(backend, model::parse_model(kChain, "chain"), in, 5, options);
    net.initialise(7);
    return net;
}

}  // namespace

TEST_CASE("a first convolution's channels-last output and gradients in nets on tensor cores",
          "[gpu]") {
    on_tensor_cores([](Bench& bench) {
        for (const auto& [s, n] : {std::pair{Conv2dShape{{1, 9, 8}, 20, 3, 1, 1}, 5},
                                   {Conv2dShape{{1, 20, 17}, 64, 5, 1, 0}, 3},
                                   {Conv2dShape{{3, 5, 7}, 36, 3, 1, 2}, 2},
                                   {Conv2dShape{{3, 1, 1}, 16, 3, 1, 1}, 9}}) {
            INFO(text_of(s, n));
            const Conv2dSpec spec{.shape = s, .relu = true, .out_channels_last = true};
            RunOp op(bench.backend, spec, n);
            const Floats x = random_floats(n * s.in.elems(), 1);
            const Floats w = random_floats(s.weight_elems(), 2);
            const Floats b = random_floats(s.out_channels, 3);
            const Sums sums = reference::conv_forward(s, n, x, w, b);
            const Guarded dev_x = bench.vector(x), dev_w = bench.vector(w), dev_b = bench.vector(b);
            const Guarded y = bench.empty(n * s.out().elems());
            op.forward({.x = dev_x.get(), .y = y.get(), .params = {dev_w.get(), dev_b.get()}});
            const Floats found = y.download();
            Floats masked(found.size());  // y of the reference, [n][channels][plane]
            for (std::size_t i = 0; i < masked.size(); ++i) {
                masked[i] = std::max(0.0f, static_cast<float>(sums.value[i]));
            }
            const Floats expected = masked_channels_last(s.out(), masked, masked);
            Floats bounds(masked.size());
            for (std::size_t i = 0; i < masked.size(); ++i) {
                bounds[i] = static_cast<float>(sums.bound(i) * 1.001 +
                                               0x1p-11 * (std::abs(sums.value[i]) + 1e-6));
            }
            const Floats allowed =
                masked_channels_last(s.out(), bounds, Floats(bounds.size(), 1.0f));
            std::size_t wrong = 0;
            for (std::size_t i = 0; i < found.size(); ++i) {
                wrong += !(std::abs(found[i] - expected[i]) <= allowed[i]);
                wrong += (std::bit_cast<std::uint32_t>(found[i]) & 0x1fffu) != 0;
            }
            CHECK(wrong == 0);

            Floats dy = random_floats(n * s.out().elems(), 4);
            for (std::size_t i = 0; i < dy.size(); ++i) {
                dy[i] = masked[i] > 0.0f ? dy[i] : 0.0f;
            }
            const Guarded dev_dy = bench.vector(masked_channels_last(s.out(), dy, masked));
            const Guarded dx = bench.empty(n * s.in.elems());
            const Guarded dw = bench.empty(s.weight_elems()), db = bench.empty(s.out_channels);
            op.backward({.x = dev_x.get(),
                         .y = y.get(),
                         .dy = dev_dy.get(),
                         .dx = dx.get(),
                         .params = {dev_w.get(), dev_b.get()},
                         .grads = {dw.get(), db.get()}});
            bench.check_close(dx.download(), reference::conv_backward_data(s, n, dy, w));
            bench.check_close(dw.download(), reference::conv_backward_weights(s, n, x, dy));
            bench.check_close(db.download(), reference::bias_gradient(s.out(), n, dy));
        }
    });
}

// The same values are rounded at the same points, and all sums are the same.
TEST_CASE("convolutions on tensor cores that exchange channels last compute the same bits",
          "[gpu]") {
    on_tensor_cores([](Bench& bench) {
        for (const int n : {1, 5}) {
            const Shape in{16, 9, 8};
            model::Net whole = chain_net(bench.backend, in, n, true),
                       parts = chain_net(bench.backend, in, n, false);
            REQUIRE(whole.nodes().size() == 5);
            const auto conv = [&](std::size_t i) {
                return std::get<Conv2dSpec>(whole.nodes()[i].spec);
            };
            CHECK(conv(0).out_channels_last);
            CHECK((conv(1).in_channels_last && conv(1).out_channels_last));
            CHECK((conv(2).in_channels_last && !conv(2).out_channels_last));
            const auto linear = [&](std::size_t i) {
                return std::get<LinearSpec>(whole.nodes()[i].spec);
            };
            CHECK((linear(3).dropout == 0.5f && linear(3).dy_masked));
            CHECK(linear(4).dx_factor == 2.0f);
            const Passes a = run_net(bench.backend, whole, n), b = run_net(bench.backend, parts, n);
            CHECK(a.sums == b.sums);
            CHECK(a.evaluated == b.evaluated);
            CHECK(a.gradients == b.gradients);
        }
    });
}

// Sums in a different order may round to neighbouring TF32 numbers.
TEST_CASE("a net on tensor cores whose first convolution has one channel is close to its parts",
          "[gpu]") {
    on_tensor_cores([](Bench& bench) {
        const int n = 5;
        const Shape in{1, 9, 8};
        model::Net whole = chain_net(bench.backend, in, n, true),
                   parts = chain_net(bench.backend, in, n, false);
        CHECK(std::get<Conv2dSpec>(whole.nodes()[0].spec).out_channels_last);
        const Passes a = run_net(bench.backend, whole, n), b = run_net(bench.backend, parts, n);
        Floats difference = a.gradients;
        for (std::size_t i = 0; i < difference.size(); ++i) {
            difference[i] -= b.gradients[i];
        }
        CHECK(norm(difference) <= 0x1p-9 * norm(b.gradients));
        CHECK(std::abs(a.sums[0] - b.sums[0]) <= 0x1p-9f * std::abs(b.sums[0]));
    });
}
