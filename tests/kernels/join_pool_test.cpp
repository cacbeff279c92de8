// Average pooling, and operations that join two values, on every backend, against double precision.
#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>
#include <vector>

#include "tests/kernels/run_op.hpp"
#include "tests/support/backends.hpp"
#include "tests/support/bounded.hpp"
#include "tests/support/catch.hpp"

using namespace gyre;
using namespace gyre::test;

namespace {

const int kBatches[] = {0, 1, 2, 17, 33};

// Calls body(output, input) for all pairs in one plane.
template <typename Body>
void for_windows(const AvgPool2dSpec& s, Body&& body) {
    const Shape out = s.out();
    for (int row = 0; row < out.height; ++row) {
        for (int col = 0; col < out.width; ++col) {
            for (int kh = 0; kh < s.kernel_height; ++kh) {
                for (int kw = 0; kw < s.kernel_width; ++kw) {
                    body(row * out.width + col,
                         (row * s.stride + kh) * s.in.width + col * s.stride + kw);
                }
            }
        }
    }
}

// Sums whose terms were multiplied by a rounded scale, before or after summation; or exact ones.
std::vector<Bounded> averages(const std::vector<BoundedSum>& sums, bool exact) {
    std::vector<Bounded> all;
    for (const BoundedSum& sum : sums) {
        all.push_back(exact ? Bounded(sum.result().value) : sum.result().rounded(2));
    }
    return all;
}

void check_average_pooling(Bench& bench, const AvgPool2dSpec& spec, int n) {
    const Shape &in = spec.in, out = spec.out();
    INFO(in.height << " x " << in.width << ", window " << spec.kernel_height << " x "
                   << spec.kernel_width << ", stride " << spec.stride << ", n = " << n);
    const int window = spec.kernel_height * spec.kernel_width;
    // Sums of small integers divided by a power of two are exact.
    const bool exact = (window & (window - 1)) == 0;
    const auto values = [&](std::int64_t elems, std::uint32_t stream) {
        Floats made = random_floats(elems, stream);
        for (float& v : made) {
            v = exact ? std::floor(8.0f * v) : v;
        }
        return made;
    };
    const Floats x = values(n * in.elems(), 51), dy = values(n * out.elems(), 52);
    std::vector<BoundedSum> y(dy.size()), dx(x.size());
    for (std::int64_t plane = 0; plane < std::int64_t{n} * in.channels; ++plane) {
        for_windows(spec, [&](int output, int input) {
            const auto to = static_cast<std::size_t>(plane * out.plane_elems() + output);
            const auto from = static_cast<std::size_t>(plane * in.plane_elems() + input);
            y[to].add(double{x[from]} / window);
            dx[from].add(double{dy[to]} / window);
        });
    }
    const Guarded dev_x = bench.activation(in, n, x), dev_dy = bench.activation(out, n, dy);
    const Guarded dev_y = bench.empty_activation(out, n), dev_dx = bench.empty_activation(in, n);
    RunOp pool(bench.backend, spec, std::max(n, 1));
    pool.batch.n = n;
    pool.forward({.x = dev_x.get(), .y = dev_y.get()});
    check_within(bench.read(out, n, dev_y), averages(y, exact));
    pool.backward({.dy = dev_dy.get(), .dx = dev_dx.get()});
    check_within(bench.read(in, n, dev_dx), averages(dx, exact));
}

}  // namespace

TEST_CASE("average pooling: windows that overlap, touch, leave gaps, or are the plane", "[gpu]") {
    on_every_backend([](Bench& bench) {
        for (const int n : kBatches) {
            for (int kernel = 1; kernel <= 4; ++kernel) {
                for (int stride = 1; stride <= kernel + 1; ++stride) {
                    check_average_pooling(bench,
                                          {.in = {3, 7, 9},
                                           .kernel_height = kernel,
                                           .kernel_width = kernel,
                                           .stride = stride},
                                          n);
                }
            }
            for (const Shape& in : {Shape{20, 1, 1}, Shape{5, 5, 7}, Shape{2, 8, 4}}) {
                check_average_pooling(
                    bench,
                    {.in = in, .kernel_height = in.height, .kernel_width = in.width, .stride = 1},
                    n);
            }
        }
    });
}

TEST_CASE("the sum of a residual connection is rounded once", "[gpu]") {
    on_every_backend([](Bench& bench) {
        for (const Shape& shape : {Shape{1, 1, 1}, Shape{3, 5, 7}, Shape{20, 14, 14}}) {
            for (const int n : kBatches) {
                Floats x = random_floats(n * shape.elems(), 61);
                const Floats x2 = random_floats(n * shape.elems(), 62);
                for (std::size_t i = 0; i < x.size(); ++i) {
                    x[i] = std::ldexp(x[i], static_cast<int>(i % 50) - 25);
                }
                if (!x.empty()) {
                    x[0] = std::numeric_limits<float>::infinity();
                }
                Floats expected = x;
                for (std::size_t i = 0; i < x.size(); ++i) {
                    expected[i] += x2[i];
                }
                const Guarded y = bench.activation(shape, n, x);
                const Guarded dev_x2 = bench.activation(shape, n, x2);
                RunOp add(bench.backend, AddSpec{.in = shape}, std::max(n, 1));
                add.batch.n = n;
                REQUIRE(add.needs().in_place);
                add.forward({.x = y.get(), .y = y.get(), .x2 = dev_x2.get()});
                CHECK(bench.read(shape, n, y) == expected);
                CHECK(bench.read(shape, n, dev_x2) == x2);
            }
        }
    });
}

TEST_CASE("channels are multiplied by their gates, of which each has the sum as its gradient",
          "[gpu]") {
    on_every_backend([](Bench& bench) {
        for (const Shape& shape : {Shape{5, 7, 9}, Shape{3, 1, 1}, Shape{2, 40, 3}}) {
            const Shape gates{shape.channels, 1, 1};
            for (const int n : {0, 1, 17, 33}) {
                INFO(shape.height << " x " << shape.width << ", n = " << n);
                const Floats gate = random_floats(n * gates.elems(), 31);
                const Floats x = random_floats(n * shape.elems(), 32);
                const Floats dy = random_floats(n * shape.elems(), 33);
                Floats y = x, dx = dy;
                Sums dgate(n * gates.elems());
                for (std::size_t i = 0; i < x.size(); ++i) {
                    const std::size_t plane = i / static_cast<std::size_t>(shape.plane_elems());
                    y[i] *= gate[plane];
                    dx[i] *= gate[plane];
                    dgate.add(static_cast<std::int64_t>(plane), double{x[i]} * double{dy[i]});
                }
                const Guarded dev_gate = bench.activation(gates, n, gate);
                const Guarded dev_x = bench.activation(shape, n, x);
                const Guarded dev_dy = bench.activation(shape, n, dy);
                const Guarded dev_y = bench.empty_activation(shape, n);
                const Guarded dev_dx = bench.empty_activation(shape, n);
                const Guarded dev_dgate = bench.empty_activation(gates, n);
                RunOp mul(bench.backend, MulSpec{gates, shape}, std::max(n, 1));
                mul.batch.n = n;
                mul.forward({.x = dev_gate.get(), .y = dev_y.get(), .x2 = dev_x.get()});
                CHECK(bench.read(shape, n, dev_y) == y);
                const OpIo io{.x = dev_gate.get(), .x2 = dev_x.get(), .dy = dev_dy.get()};
                OpIo both = io;
                both.dx = dev_dgate.get();
                both.dx2 = dev_dx.get();
                mul.backward(both);
                CHECK(bench.read(shape, n, dev_dx) == dx);
                bench.check_close(bench.read(gates, n, dev_dgate), dgate);
                const Guarded alone = bench.empty_activation(shape, n);
                const Guarded gate_alone = bench.empty_activation(gates, n);
                OpIo one = io;
                one.dx2 = alone.get();
                mul.backward(one);
                CHECK(bench.read(shape, n, alone) == dx);
                one = io;
                one.dx = gate_alone.get();
                mul.backward(one);
                CHECK(bench.read(gates, n, gate_alone) == bench.read(gates, n, dev_dgate));
            }
        }
    });
}

TEST_CASE("channels of two values are put one after the other, and their gradients taken apart",
          "[gpu]") {
    on_every_backend([](Bench& bench) {
        for (const auto& [shape, shape2] :
             {std::pair{Shape{5, 7, 9}, Shape{2, 7, 9}}, {Shape{1, 1, 1}, Shape{3, 1, 1}}}) {
            const Shape whole = ConcatSpec{shape, shape2}.out();
            for (const int n : {0, 1, 17, 33}) {
                INFO(shape.height << " x " << shape.width << ", n = " << n);
                const Floats x = random_floats(n * shape.elems(), 31);
                const Floats x2 = random_floats(n * shape2.elems(), 32);
                Floats y;
                for (std::ptrdiff_t i = 0; i < n; ++i) {
                    const auto elems = shape.elems(), elems2 = shape2.elems();
                    y.insert(y.end(), x2.begin() + i * elems2, x2.begin() + (i + 1) * elems2);
                    y.insert(y.end(), x.begin() + i * elems, x.begin() + (i + 1) * elems);
                }
                const Guarded dev_x = bench.activation(shape, n, x);
                const Guarded dev_x2 = bench.activation(shape2, n, x2);
                const Guarded dev_y = bench.empty_activation(whole, n);
                RunOp concat(bench.backend, ConcatSpec{shape, shape2}, std::max(n, 1));
                concat.batch.n = n;
                concat.forward({.x = dev_x.get(), .y = dev_y.get(), .x2 = dev_x2.get()});
                CHECK(bench.read(whole, n, dev_y) == y);
                for (const bool first : {false, true}) {
                    for (const bool second : {false, true}) {
                        const Guarded dx = bench.empty_activation(shape, n);
                        const Guarded dx2 = bench.empty_activation(shape2, n);
                        concat.backward({.dy = dev_y.get(),
                                         .dx = first ? dx.get() : nullptr,
                                         .dx2 = second ? dx2.get() : nullptr});
                        CHECK((!first || bench.read(shape, n, dx) == x));
                        CHECK((!second || bench.read(shape2, n, dx2) == x2));
                    }
                }
            }
        }
    });
}
