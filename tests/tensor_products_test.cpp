// Products on tensor cores, in TF32: convolutions and linear layers of the shapes that their main
// loop takes, alone and fused, on the emulated GPU under several schedules, and on a GPU.
#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <vector>

#include "kernels/emulation/emulator.hpp"
#include "tests/backends.hpp"
#include "tests/catch.hpp"
#include "tests/chains.hpp"
#include "tests/directions.hpp"

using namespace gyre;
using namespace gyre::test;

namespace {

void on_tensor_cores(const std::function<void(Bench&)>& test) {
    GpuOptions options;
    options.tf32 = true;
    const auto run = [&](std::unique_ptr<Backend> backend) {
        INFO("backend: " << backend->description());
        Bench bench(*backend);
        bench.product_error = 2 * 0x1p-11 + 0x1p-22;
        test(bench);
    };
    for (const std::uint64_t seed : {0, 1, 2}) {
        INFO("schedule " << seed);
        emulated::emulator::set_schedule(seed);
        run(make_emulated_backend(options));
    }
    emulated::emulator::set_schedule(0);
#if !defined(GYRE_CHECKER)
    if (cuda_device_count() > 0) {
        run(make_cuda_backend(options));
    }
#endif
}

struct ConvCase {
    Conv2dShape shape;
    int n;
};
const ConvCase kConvs[] = {
    {{{16, 6, 8}, 20, 3, 1, 1}, 3},
    {{{20, 5, 7}, 16, 3, 1, 0}, 2},    // a slice of k ends in the middle of a tap
    {{{16, 1, 1}, 16, 3, 1, 1}, 5},    // all but one tap in the padding
    {{{36, 3, 4}, 20, 3, 1, 2}, 1},    // padding > kernel / 2
    {{{16, 9, 5}, 24, 5, 1, 2}, 2},    // 25 taps
    {{{64, 5, 6}, 132, 3, 1, 1}, 2},   // k divided; several tiles of n
    {{{132, 3, 3}, 68, 1, 1, 0}, 9},   // several tiles of m and n
    {{{16, 14, 13}, 16, 3, 1, 1}, 6},  // dw: k divided
};

const LinearShape kLinears[] = {{32, 36}, {300, 300}, {1036, 68}, {68, 260}};

}  // namespace

TEST_CASE("convolutions on tensor cores match the reference in all three directions") {
    on_tensor_cores([](Bench& bench) {
        for (const ConvCase& c : kConvs) {
            INFO(text_of(c.shape, c.n));
            check_directions(bench, Conv2dSpec{.shape = c.shape}, c.shape, c.n);
        }
    });
}

TEST_CASE("linear layers on tensor cores match the reference in all three directions") {
    on_tensor_cores([](Bench& bench) {
        for (const LinearShape& s : kLinears) {
            for (const int n : {1, 67, 130}) {
                INFO("linear " << s.in_features << " -> " << s.out_features << ", n = " << n);
                const LinearSpec spec{.in = {s.in_features, 1, 1}, .shape = s};
                check_directions(bench, spec, reference::as_conv(s), n);
            }
        }
        const LinearShape s{32, 36};  // dw: images divided
        check_directions(bench, LinearSpec{.in = {32, 1, 1}, .shape = s}, reference::as_conv(s),
                         1040);
    });
}

// Numbers of a few bits: all sums are exact, in any order, and many are equal.
TEST_CASE("convolutions and linear layers fused on tensor cores do what their parts do") {
    on_tensor_cores([&](Bench& bench) {
        const auto exact = make_emulated_backend({});  // the CPU's filters would not be
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
                check(fused, {parts, ReluSpec{parts.out()}},
                      random_operands(n, parts.in, parts.out(), shape.weight_elems(),
                                      shape.out_features));
            }
        }
    });
}

// Cut to TF32 instead of rounded, each operand would be off by almost 2^-10.
TEST_CASE("operands of tensor cores are rounded to the nearest") {
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

TEST_CASE("NaN and infinity go through tensor cores") {
    const float nans[] = {std::numeric_limits<float>::quiet_NaN(),
                          std::bit_cast<float>(0x7fffffffu),  // a GPU's own
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
