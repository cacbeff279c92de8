// Convolution and linear layers on every backend, against a naive double-precision reference, over
// odd shapes, with poisoned outputs and guarded buffers.
#include <algorithm>
#include <array>
#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "tests/kernels/directions.hpp"
#include "tests/support/backends.hpp"
#include "tests/support/catch.hpp"

using namespace gyre;
using namespace gyre::test;

namespace {

const Conv2dShape kConvs[] = {
    {{1, 28, 28}, 10, 5, 1, 0},  // net
    {{10, 12, 12}, 20, 5, 1, 0},
    {{3, 7, 9}, 5, 3, 1, 1},  // not square
    {{2, 1, 1}, 3, 1, 1, 0},  // 1 x 1 images
    {{1, 1, 1}, 2, 3, 1, 1},  // all window positions but one are in the padding
    {{3, 8, 8}, 7, 3, 2, 1},  // strides
    {{2, 9, 7}, 4, 5, 3, 2},
    {{2, 6, 6}, 3, 2, 3, 0},  // stride > kernel: some pixels are never read
    {{2, 6, 4}, 3, 2, 9, 1},  // stride > extents: most remainders have no pixel
    {{2, 5, 5}, 6, 3, 1, 3},  // padding > kernel / 2
    {{1, 4, 5}, 1, 4, 2, 4},  // windows entirely in the padding
    {{2, 7, 9}, 3, 4, 1, 1},  // windows of even extent
    {{17, 6, 7}, 18, 4, 1, 2},
    {{13, 5, 3}, 23, 3, 1, 1},
    {{4, 6, 6}, 64, 1, 2, 0},
    // 3 x 3 and 5 x 5 with many channels, which Winograd filtering may compute
    {{16, 6, 8}, 17, 3, 1, 1},
    {{19, 5, 7}, 16, 3, 1, 0},  // odd extents: half tiles
    {{16, 1, 1}, 16, 3, 1, 1},
    {{33, 3, 4}, 20, 3, 1, 2},
    {{64, 5, 6}, 128, 3, 1, 1},  // wide's channels
    {{9, 5, 6}, 8, 5, 1, 0},
    {{8, 1, 3}, 9, 5, 1, 2},
    {{17, 14, 9}, 33, 5, 1, 4},
    {{128, 3, 3}, 64, 1, 1, 0},
};

// Fewer images for large shapes: a few already fill more than one block or tile.
std::vector<int> batches_for(const Conv2dShape& s) {
    const std::int64_t flop = s.flop_per_image();
    return flop <= 100'000     ? std::vector{1, 15, 17, 64}
           : flop <= 1'000'000 ? std::vector{1, 15, 17}
                               : std::vector{1, 3};
}

}  // namespace

TEST_CASE("conv2d matches the reference in all three directions", "[gpu]") {
    on_every_backend([](Bench& bench) {
        for (const Conv2dShape& s : kConvs) {
            for (const int n : batches_for(s)) {
                INFO(text_of(s, n));
                check_directions(bench, Conv2dSpec{.shape = s}, s, n);
            }
        }
    });
}

TEST_CASE("grouped conv2d matches the reference in all three directions", "[gpu]") {
    const Conv2dShape shapes[] = {
        {{8, 9, 7}, 8, 3, 1, 1, 8},  // depthwise
        {{32, 14, 14}, 32, 3, 2, 1, 32},
        {{6, 12, 12}, 12, 5, 2, 2, 6},  // two outputs for each input
        {{12, 6, 8}, 8, 3, 1, 1, 4},
        {{4, 5, 5}, 6, 1, 1, 0, 2},
        {{6, 6, 4}, 3, 2, 9, 1, 3},  // stride > extents
        {{4, 6, 6}, 4, 2, 3, 0, 2},  // stride > kernel: some pixels are never read
        {{4, 4, 5}, 4, 4, 2, 4, 4},  // windows entirely in the padding
        {{9, 1, 1}, 9, 3, 1, 1, 9},
        {{2, 3, 11}, 4, 3, 2, 2, 2},
    };
    on_every_backend([&](Bench& bench) {
        for (const Conv2dShape& s : shapes) {
            for (const int n : batches_for(s)) {
                INFO(text_of(s, n));
                check_directions(bench, GroupedConv2dSpec{s}, s, n);
            }
        }
    });
}

TEST_CASE("linear matches the reference in all three directions", "[gpu]") {
    const LinearShape shapes[] = {{320, 50}, {50, 10},  {1, 1},     {1, 63},    {7, 5},
                                  {16, 6},   {65, 129}, {300, 300}, {1030, 11}, {257, 258}};
    on_every_backend([&](Bench& bench) {
        for (const LinearShape& s : shapes) {
            for (const int n : {1, 15, 17, 64, 100}) {
                INFO("linear " << s.in_features << " -> " << s.out_features << ", n = " << n);
                const LinearSpec spec{.in = {s.in_features, 1, 1}, .shape = s};
                check_directions(bench, spec, reference::as_conv(s), n);
            }
        }
    });
}

TEST_CASE("gradients of weights are zero for an empty batch", "[gpu]") {
    on_every_backend([](Bench& bench) {
        const Conv2dShape conv{{2, 5, 5}, 3, 3, 1, 1};
        const LinearShape linear{20, 9};
        const auto check = [&](const OpSpec& spec, std::int64_t weights, std::int64_t biases) {
            const Guarded x = bench.empty(4096), dy = bench.empty(4096);
            const Guarded dw = bench.empty(weights), db = bench.empty(biases);
            RunOp op(bench.backend, spec, 16);
            op.batch.n = 0;
            op.backward({.x = x.get(), .dy = dy.get(), .grads = {dw.get(), db.get()}});
            CHECK(dw.download() == Floats(static_cast<std::size_t>(weights)));
            CHECK(db.download() == Floats(static_cast<std::size_t>(biases)));
        };
        check(Conv2dSpec{.shape = conv}, conv.weight_elems(), conv.out_channels);
        const Conv2dShape grouped{{4, 5, 5}, 6, 3, 1, 1, 2};
        check(GroupedConv2dSpec{grouped}, grouped.weight_elems(), grouped.out_channels);
        check(LinearSpec{.in = {20, 1, 1}, .shape = linear}, linear.weight_elems(),
              linear.out_features);
    });
}

// More blocks of images than the weight gradient has separate sums, and enough channels that all
// blocks share one.
TEST_CASE("a convolution's results do not depend on the number of threads") {
    for (const auto& [s, n] : {std::pair{Conv2dShape{{9, 6, 7}, 8, 5, 1, 0}, 300},
                               {Conv2dShape{{256, 2, 2}, 256, 3, 1, 1}, 20},
                               {Conv2dShape{{150, 7, 6}, 146, 3, 1, 1}, 100},
                               {Conv2dShape{{3, 9, 8}, 7, 3, 2, 1}, 300},
                               {Conv2dShape{{6, 9, 8}, 12, 3, 2, 1, 6}, 300}}) {
        const OpSpec spec = s.groups > 1 ? OpSpec{GroupedConv2dSpec{s}}
                                         : OpSpec{Conv2dSpec{.shape = s, .relu = true}};
        const auto results = [&, shape = s, images = n](int threads) {
            const auto backend = make_cpu_backend(threads);
            Bench bench(*backend);
            const Guarded x =
                bench.activation(shape.in, images, random_floats(images * shape.in.elems(), 1));
            const Guarded dy = bench.activation(shape.out(), images,
                                                random_floats(images * shape.out().elems(), 2));
            const Guarded w = bench.vector(random_floats(shape.weight_elems(), 3));
            const Guarded b = bench.vector(random_floats(shape.out_channels, 4));
            const Guarded y = bench.empty_activation(shape.out(), images);
            const Guarded dx = bench.empty_activation(shape.in, images);
            const Guarded dw = bench.empty(shape.weight_elems()),
                          db = bench.empty(shape.out_channels);
            RunOp op(*backend, spec, images);
            op.forward({.x = x.get(), .y = y.get(), .params = {w.get(), b.get()}});
            op.backward({.x = x.get(),
                         .y = y.get(),
                         .dy = dy.get(),
                         .dx = dx.get(),
                         .params = {w.get(), b.get()},
                         .grads = {dw.get(), db.get()}});
            return std::array{bench.read(shape.out(), images, y), bench.read(shape.in, images, dx),
                              dw.download(), db.download()};
        };
        INFO(text_of(s, n));
        const auto one = results(1);
        CHECK(results(2) == one);
        CHECK(results(5) == one);
    }
}

// As if ranks gathered the factors of all: the operation is created for one rank's images.
TEST_CASE("a linear layer's weight gradient may cover more images than the layer is created for") {
    for (const LinearShape& shape : {LinearShape{70, 13}, {64, 6}}) {
        const LinearSpec spec{.in = {shape.in_features, 1, 1}, .shape = shape};
        const auto gradient = [&](int made_for) {
            const auto backend = make_cpu_backend(2);
            Bench bench(*backend);
            const int n = 100;
            const Guarded x = bench.activation(spec.in, n, random_floats(n * spec.in.elems(), 1));
            const Guarded dy =
                bench.activation(spec.out(), n, random_floats(n * spec.out().elems(), 2));
            const Guarded dw = bench.empty(shape.weight_elems());
            const Guarded db = bench.empty(shape.out_features);
            RunOp op(*backend, spec, made_for);
            op.batch.n = n;
            op.backward({.x = x.get(), .dy = dy.get(), .grads = {dw.get(), db.get()}});
            return std::pair(dw.download(), db.download());
        };
        CHECK(gradient(33) == gradient(100));
    }
}

// Convolution and linear layers are linear in each operand, so the central difference is exact
// except for rounding: <dy, f(x + v) - f(x - v)> / 2 = <dx, v>.
TEST_CASE("conv2d gradients agree with finite differences of the forward kernel", "[gpu]") {
    on_every_backend([](Bench& bench) {
        for (const Conv2dShape& s : kConvs) {
            const int n = batches_for(s).back();
            INFO(text_of(s, n));
            RunOp op(bench.backend, Conv2dSpec{.shape = s}, n);
            const Floats x = random_floats(n * s.in.elems(), 5),
                         w = random_floats(s.weight_elems(), 6);
            const Floats b = random_floats(s.out_channels, 7);
            const Floats dy = random_floats(n * s.out().elems(), 8);
            const auto forward = [&](const Floats& at_x, const Floats& at_w) {
                const Guarded dev_x = bench.activation(s.in, n, at_x);
                const Guarded dev_w = bench.vector(at_w), dev_b = bench.vector(b);
                const Guarded y = bench.empty_activation(s.out(), n);
                op.forward({.x = dev_x.get(), .y = y.get(), .params = {dev_w.get(), dev_b.get()}});
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
            op.backward({.x = dev_x.get(),
                         .dy = dev_dy.get(),
                         .dx = dx.get(),
                         .params = {dev_w.get()},
                         .grads = {dw.get(), db.get()}});
            // Rounding of the outputs: u times their norm, with a factor for the sums.
            const double slack =
                64 * (0x1p-24 + bench.product_error) * norm(dy) * (may_be_winograd(s) ? 4 : 1);
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
