// Fused operations compute the same as their parts in sequence, to the last bit except for the
// signs of zeros: on the CPU, with one and several threads.
#include <algorithm>
#include <cmath>
#include <deque>
#include <functional>
#include <limits>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "tests/kernels/chains.hpp"
#include "tests/support/backends.hpp"
#include "tests/support/catch.hpp"

using namespace gyre;
using namespace gyre::test;

namespace {

void check_fused(const OpSpec& fused, const std::vector<OpSpec>& parts, const Operands& operands) {
    for (const int threads : cpu_threads()) {
        INFO("threads: " << threads);
        const auto backend = make_cpu_backend(threads);
        Bench bench(*backend);
        const Results expected = run_chain(bench, parts, operands);
        const Results found = run_chain(bench, {fused}, operands);
        check_equal(found.evaluated, expected.evaluated);
        check_equal(found.y, expected.y);
        check_equal(found.dw, expected.dw);
        check_equal(found.db, expected.db);
        check_equal(found.dx, expected.dx);
    }
}

void check_conv(const Conv2dSpec& spec, int n) {
    const Conv2dShape& s = spec.shape;
    INFO("conv " << s.in.channels << "x" << s.in.height << "x" << s.in.width << " -> "
                 << s.out_channels << " k" << s.kernel << " s" << s.stride << " p" << s.padding
                 << ", dropout " << spec.dropout << ", pool " << spec.pool_kernel << " s"
                 << spec.pool_stride << (spec.relu ? ", relu" : "") << ", n = " << n);
    Operands operands = random_operands(n, s.in, spec.out(), s.weight_elems(), s.out_channels);
    // Weights of a few bits give many equal outputs, of which the first must win.
    for (Floats* values : {&operands.x, &operands.w, &operands.b}) {
        for (float& value : *values) {
            value = std::round(value * 2);
        }
    }
    check_fused(spec, parts_of(spec), operands);
}

}  // namespace

TEST_CASE("a convolution fused with dropout2d, max-pooling and ReLU equals its parts") {
    const Conv2dShape shapes[] = {
        {{1, 12, 11}, 7, 5, 1, 0},  // planes that are not square
        {{3, 9, 9}, 5, 3, 2, 1},
        {{2, 6, 7}, 4, 3, 1, 2},
        {{5, 4, 4}, 8, 1, 1, 0},
        {{9, 7, 8}, 10, 4, 1, 1},
        // by Winograd, even and odd extents
        {{16, 8, 6}, 17, 3, 1, 1},
        {{17, 9, 7}, 16, 3, 1, 0},
        {{8, 12, 11}, 9, 5, 1, 0},
        {{9, 5, 8}, 8, 5, 1, 2},
    };
    const MaxPool2dShape pools[] = {{{}, 0, 0}, {{}, 2, 2}, {{}, 3, 2}, {{}, 3, 3}, {{}, 2, 3}};
    for (const Conv2dShape& shape : shapes) {
        for (const MaxPool2dShape& pool : pools) {
            for (const float dropout : {0.0f, 0.3f}) {
                for (const bool relu : {false, true}) {
                    const Conv2dSpec spec{.shape = shape,
                                          .dropout = dropout,
                                          .dropout_stream = 5,
                                          .pool_kernel = pool.kernel,
                                          .pool_stride = pool.stride,
                                          .relu = relu};
                    if (!spec.fused()) {
                        continue;
                    }
                    for (const int n : {0, 1, 16, 37}) {
                        check_conv(spec, n);
                    }
                }
            }
        }
    }
}

TEST_CASE("fused convolutions equal their parts if a batch exceeds a cache") {
    // Gradients of a row tile of one block, and padded copies of one block, are all that fits at a
    // time.
    for (const Conv2dShape& shape :
         {Conv2dShape{{1, 28, 28}, 11, 5, 1, 0}, Conv2dShape{{2, 30, 30}, 6, 3, 1, 1},
          Conv2dShape{{64, 29, 28}, 16, 3, 1, 1}, Conv2dShape{{32, 20, 21}, 16, 5, 1, 2}}) {
        for (const int kernel : {2, 3}) {
            check_conv({.shape = shape,
                        .dropout = 0.5f,
                        .pool_kernel = kernel,
                        .pool_stride = 2,
                        .relu = true},
                       70);
        }
        check_conv({.shape = shape, .relu = true}, 70);
    }
}

TEST_CASE("a linear layer fused with ReLU equals its parts") {
    for (const LinearShape& shape : {LinearShape{320, 50}, {50, 10}, {7, 5}, {9000, 3}}) {
        for (const int n : {0, 1, 16, 37}) {
            INFO("linear " << shape.in_features << " -> " << shape.out_features << ", n = " << n);
            const LinearSpec parts{.in = {shape.in_features, 1, 1}, .shape = shape};
            LinearSpec fused = parts;
            fused.relu = true;
            check_fused(fused, {parts, ReluSpec{parts.out()}},
                        random_operands(n, parts.in, parts.out(), shape.weight_elems(),
                                        shape.out_features));
        }
    }
}

// Leaves without images, of less than a block of them and of several.
TEST_CASE("leaves that go through a linear layer together have the bits that they have alone") {
    constexpr int kImages[] = {16, 5, 0, 37, 16, 1, 20};
    constexpr int kMost = 37;
    const std::vector<std::pair<int, int>> ranges = {{0, 4}, {4, 6}, {6, 7}};
    for (const LinearShape& shape : {LinearShape{36, 4100}, {2309, 61}}) {
        for (const bool relu : {false, true}) {
            for (const int threads : cpu_threads()) {
                INFO("linear " << shape.in_features << " -> " << shape.out_features << ", relu "
                               << relu << ", threads " << threads);
                const LinearSpec spec{
                    .in = {shape.in_features, 1, 1}, .shape = shape, .relu = relu};
                const auto backend = make_cpu_backend(threads);
                Bench bench(*backend);
                const std::int64_t weights = shape.weight_elems(), biases = shape.out_features;
                const Floats w = random_floats(weights, 2), b = random_floats(biases, 3);
                const Guarded dev_w = bench.vector(w), dev_b = bench.vector(b);
                const Guarded flat = bench.empty(weights + biases);
                std::vector<Results> alone;
                std::vector<Batch> batches;
                std::deque<Guarded> memory;
                std::vector<OpIo> ios;
                for (const int n : kImages) {
                    const auto leaf = static_cast<unsigned>(alone.size());
                    Operands on{n, random_floats(n * spec.in.elems(), 10 + leaf), w, b,
                                random_floats(n * biases, 20 + leaf)};
                    batches.push_back({.n = n, .training = true});
                    OpIo& io = ios.emplace_back();
                    io.x = memory.emplace_back(bench.activation(spec.in, n, on.x)).get();
                    io.dy = memory.emplace_back(bench.activation(spec.out(), n, on.dy)).get();
                    io.y = memory.emplace_back(bench.empty_activation(spec.out(), n)).get();
                    io.dx = memory.emplace_back(bench.empty_activation(spec.in, n)).get();
                    io.params = {dev_w.get(), dev_b.get()};
                    io.grads = {flat.get(), flat.get() + weights};
                    alone.push_back(run_chain(bench, {spec}, on));
                }
                std::vector<const OpIo*> places;
                for (const OpIo& io : ios) {
                    places.push_back(&io);
                }
                std::vector<LeafSums::Node> nodes;
                for (const auto& [first, last] : ranges) {
                    nodes.push_back(
                        {first, last, memory.emplace_back(bench.empty(weights + biases)).get()});
                }
                const auto op = backend->make("layer", spec, {.train_images = kMost, .leaves = 7});
                REQUIRE(op->needs().together);
                const Leaves leaves{batches, places.data()};
                op->forward_leaves(leaves);
                for (std::size_t leaf = 0; leaf < ios.size(); ++leaf) {
                    op->backward_begin(batches[leaf], ios[leaf]);
                }
                op->backward_params_leaves(leaves, {nodes, flat.get()});
                op->backward_input_leaves(leaves);
                for (std::size_t leaf = 0; leaf < ios.size(); ++leaf) {
                    const int n = kImages[leaf];
                    INFO("leaf " << leaf);
                    Floats y(static_cast<std::size_t>(n * biases)),
                        dx(static_cast<std::size_t>(n * spec.in.elems()));
                    backend->export_activation(spec.out(), n, ios[leaf].y.f32(), y.data());
                    backend->export_activation(spec.in, n, ios[leaf].dx.f32(), dx.data());
                    CHECK(y == alone[leaf].y);
                    CHECK(dx == alone[leaf].dx);
                }
                const auto sum = [](Floats left, const Floats& right) {
                    std::transform(left.begin(), left.end(), right.begin(), left.begin(),
                                   std::plus<>());
                    return left;
                };
                const auto sums = [&](Floats Results::*part) {
                    const auto of = [&](int leaf) {
                        return alone[static_cast<std::size_t>(leaf)].*part;
                    };
                    return std::vector<Floats>{sum(sum(of(0), of(1)), sum(of(2), of(3))),
                                               sum(of(4), of(5)), of(6)};
                };
                const std::vector<Floats> dw = sums(&Results::dw), db = sums(&Results::db);
                for (std::size_t i = 0; i < nodes.size(); ++i) {
                    const float* const found = nodes[i].flat;
                    CHECK(Floats(found, found + weights) == dw[i]);
                    CHECK(Floats(found + weights, found + weights + biases) == db[i]);
                }
            }
        }
    }
    // A small layer's weights stay in the cache in any case.
    const auto backend = make_cpu_backend(1);
    const LinearSpec small{.in = {320, 1, 1}, .shape = {320, 50}};
    CHECK(!backend->make("layer", small, {.train_images = 1, .leaves = 2})->needs().together);
}

TEST_CASE("fused operations propagate NaN") {
    for (const Conv2dShape& shape :
         {Conv2dShape{{2, 9, 8}, 3, 3, 1, 0}, Conv2dShape{{16, 9, 8}, 16, 3, 1, 1}}) {
        const Conv2dSpec spec{
            .shape = shape, .dropout = 0.3f, .pool_kernel = 2, .pool_stride = 2, .relu = true};
        Operands operands =
            random_operands(19, shape.in, spec.out(), shape.weight_elems(), shape.out_channels);
        operands.x[40] = std::numeric_limits<float>::quiet_NaN();
        const auto backend = make_cpu_backend(1);
        Bench bench(*backend);
        const Floats y = run_chain(bench, {spec}, operands).y;
        CHECK(std::any_of(y.begin(), y.end(), [](float v) { return std::isnan(v); }));
        check_fused(spec, parts_of(spec), operands);
    }
}

TEST_CASE("an evaluation pass saves nothing") {
    const auto backend = make_cpu_backend(1);
    Bench bench(*backend);
    const Conv2dSpec spec{.shape = {{1, 8, 8}, 3, 3, 1, 1},
                          .dropout = 0.5f,
                          .pool_kernel = 2,
                          .pool_stride = 2,
                          .relu = true};
    const Operands on = random_operands(5, spec.shape.in, spec.out(), spec.shape.weight_elems(), 3);
    const auto op = backend->make("conv", spec, {.eval_images = 5});
    CHECK(op->needs().saved_bytes == 0);
    const Guarded x = bench.activation(spec.shape.in, 5, on.x);
    const Guarded y = bench.empty_activation(spec.out(), 5);
    const Guarded w = bench.vector(on.w), b = bench.vector(on.b);
    op->forward({.n = 5}, {.x = x.get(), .y = y.get(), .params = {w.get(), b.get()}});
    check_equal(bench.read(spec.out(), 5, y), run_chain(bench, {spec}, on).evaluated);
}
