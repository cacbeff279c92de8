// Chains of operations, with which a fused operation is compared.
#pragma once

#include <cmath>
#include <numeric>
#include <utility>
#include <vector>

#include "tests/kernels/run_op.hpp"
#include "tests/support/backends.hpp"
#include "tests/support/catch.hpp"

namespace gyre::test {

inline Shape in_of(const OpSpec& spec) {
    return std::visit(
        [](const auto& each) {
            if constexpr (requires { each.shape.in; }) {
                return each.shape.in;
            } else {
                return each.in;
            }
        },
        spec);
}
inline Shape out_of(const OpSpec& spec) {
    return std::visit([](const auto& each) { return each.out(); }, spec);
}

inline std::vector<OpSpec> parts_of(const Conv2dSpec& fused) {
    std::vector<OpSpec> parts{Conv2dSpec{.shape = fused.shape}};
    if (fused.dropout > 0.0f) {
        parts.push_back(DropoutSpec{.in = fused.shape.out(),
                                    .probability = fused.dropout,
                                    .by_channel = true,
                                    .stream = fused.dropout_stream});
    }
    if (fused.pool_kernel > 0) {
        parts.push_back(MaxPool2dSpec{fused.pool()});
    }
    if (fused.relu) {
        parts.push_back(ReluSpec{fused.out()});
    }
    return parts;
}

struct Operands {
    int n = 0;
    Floats x, w, b, dy;
};
struct Results {
    Floats y, evaluated, dw, db, dx;
};

// A training pass forward and backward, and an evaluation pass, of a chain of operations, the first
// of which has parameters.
inline Results run_chain(Bench& bench, const std::vector<OpSpec>& specs, const Operands& on) {
    constexpr int kRoom = 1;  // operations are created for a slightly larger batch
    const Shape in = in_of(specs.front()), out = out_of(specs.back());
    std::vector<std::int32_t> indices(static_cast<std::size_t>(on.n + kRoom));
    std::iota(indices.begin(), indices.end(), 100);
    const auto samples = bench.array(indices);
    const auto epoch = bench.array(std::vector<std::uint32_t>{3});
    const Guarded w = bench.vector(on.w), b = bench.vector(on.b);
    const Guarded dw = bench.empty(static_cast<std::int64_t>(on.w.size()));
    const Guarded db = bench.empty(static_cast<std::int64_t>(on.b.size()));
    std::vector<std::unique_ptr<RunOp>> ops;
    std::vector<OpIo> steps;
    std::vector<Guarded> hold;
    const auto keep = [&](Guarded buffer) {
        hold.push_back(std::move(buffer));
        return hold.back().get();
    };
    const auto forward = [&](bool training) {
        steps.clear();
        float* x = keep(bench.activation(in, on.n, on.x));
        for (std::size_t i = 0; i < ops.size(); ++i) {
            RunOp& op = *ops[i];
            op.batch = {.n = on.n,
                        .training = training,
                        .samples = samples.get(),
                        .seed = 7,
                        .epoch = epoch.get()};
            float* y =
                op.needs().in_place ? x : keep(bench.empty_activation(out_of(specs[i]), on.n));
            OpIo io{.x = x, .y = y};
            if (i == 0) {
                io.params = {w.get(), b.get()};
                io.grads = {dw.get(), db.get()};
            }
            op.forward(io);
            steps.push_back(io);
            x = y;
        }
        Floats values(static_cast<std::size_t>(on.n * out.elems()));
        bench.backend.export_activation(out, on.n, x, values.data());
        return values;
    };
    for (const OpSpec& spec : specs) {
        ops.push_back(std::make_unique<RunOp>(bench.backend, spec, on.n + kRoom));
    }
    hold.reserve(4 * specs.size() + 4);
    Results results;
    results.evaluated = forward(false);
    results.y = forward(true);
    float* dy = keep(bench.activation(out, on.n, on.dy));
    for (std::size_t i = ops.size(); i-- > 0;) {
        steps[i].dy = dy;
        if (!ops[i]->needs().in_place) {
            dy = keep(bench.empty_activation(in_of(specs[i]), on.n));
        }
        steps[i].dx = dy;
        ops[i]->backward(steps[i]);
    }
    results.dx.resize(static_cast<std::size_t>(on.n * in.elems()));
    bench.backend.export_activation(in, on.n, dy, results.dx.data());
    results.dw = dw.download();
    results.db = db.download();
    return results;
}

inline void check_equal(const Floats& found, const Floats& expected) {
    REQUIRE(found.size() == expected.size());
    std::size_t wrong = 0;
    for (std::size_t i = 0; i < found.size(); ++i) {
        const bool both_nan = std::isnan(found[i]) && std::isnan(expected[i]);
        wrong += !both_nan && found[i] != expected[i];
    }
    CHECK(wrong == 0);
}

inline Operands random_operands(int n, const Shape& in, const Shape& out, std::int64_t weights,
                                int biases) {
    return {n, random_floats(n * in.elems(), 1), random_floats(weights, 2),
            random_floats(biases, 3), random_floats(n * out.elems(), 4)};
}

}  // namespace gyre::test
