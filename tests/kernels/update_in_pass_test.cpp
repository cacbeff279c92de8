// Updates fused with the gradient of large linear layers on tensor cores, which is never stored,
// compared with the optimizer's own, bit for bit.
#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "kernels/emulation/emulator.hpp"
#include "tests/kernels/run_op.hpp"
#include "tests/support/backends.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/typed_values.hpp"

using namespace gyre;
using namespace gyre::test;

namespace {

std::unique_ptr<Backend> tensor_backend() {
    GpuOptions options;
    options.tf32 = true;
    return make_emulated_backend(options);
}

struct Rule {
    const char* name;
    Formula formula;
    float momentum = 0.0f, weight_decay = 0.0f;
    bool nesterov = false;
    float shrink = 1.0f;
};
const Rule kRules[] = {{"sgd", Formula::sgd, 0.0f, 0.1f},
                       {"sgd, momentum", Formula::sgd_momentum, 0.9f, 0.1f},
                       {"sgd, nesterov", Formula::sgd_momentum, 0.9f, 0.0f, true},
                       {"adam", Formula::adam, 0.0f, 0.1f},
                       {"adamw", Formula::adam, 0.0f, 0.0f, false, 0.97f},
                       {"lion", Formula::lion, 0.0f, 0.0f, false, 0.97f},
                       {"rmsprop", Formula::rmsprop, 0.0f, 0.1f}};

// At least 129 tiles. The bias's column is in the last tile of weights, or in a tile of its own;
// the last rows do not fill a tile.
const LinearShape kShapes[] = {{2056, 1032}, {1920, 1040}};

// Parameters and their associated values, in buffers laid out as in a net: the layer begins at
// kOffset, and its bias is padded.
struct Buffers {
    static constexpr std::int64_t kOffset = 160;
    Buffers(Bench& bench, const LinearShape& shape)
        : bias(kOffset + (shape.weight_elems() + 15) / 16 * 16),
          elems(bias + (shape.out_features + 15) / 16 * 16),
          params(bench.vector(random_floats(elems, 1))),
          grads(bench.vector(Floats(static_cast<std::size_t>(elems)))),
          first(bench.vector(random_floats(elems, 2))),
          second(bench.vector([&] {
              Floats values = random_floats(elems, 3);
              std::for_each(values.begin(), values.end(), [](float& v) { v = std::abs(v); });
              return values;
          }())),
          word(bench.array(std::vector<std::int32_t>(1))) {}
    OpIo io(const TypedValues& x, const TypedValues& dy) const {
        return {.x = x.tensor(),
                .dy = dy.tensor(),
                .params = {params.get() + kOffset, params.get() + bias},
                .grads = {grads.get() + kOffset, grads.get() + bias}};
    }
    const std::int64_t bias, elems;
    const Guarded params, grads, first, second;
    const DeviceBuffer<std::int32_t> word;
};

struct Outcome {
    Floats params, first, second;
    std::int32_t word = -1;
    // Treats NaN as equal to NaN.
    static bool same(const Floats& a, const Floats& b) {
        return std::equal(a.begin(), a.end(), b.begin(), b.end(), [](float x, float y) {
            return x == y || (std::isnan(x) && std::isnan(y));
        });
    }
    bool operator==(const Outcome& other) const {
        return same(params, other.params) && same(first, other.first) &&
               same(second, other.second) && word == other.word;
    }
};

// Runs steps of this layer, by gradients or with fused updates.
Outcome update(Bench& bench, const LinearShape& shape, const Rule& rule, int steps, int n,
               bool at_once, float value = 0.5f, DataType type = DataType::float32) {
    const Buffers buffers(bench, shape);
    const StepScalars values{.learning_rate = 0.3f,
                             .adam_step_size = 0.1f,
                             .adam_correction = 1.5f,
                             .shrink = rule.shrink};
    const auto scalars = bench.array(std::vector<StepScalars>{values});
    UpdateArgs args{.formula = rule.formula,
                    .scalars = scalars.get(),
                    .momentum = rule.momentum,
                    .nesterov = rule.nesterov,
                    .weight_decay = rule.weight_decay,
                    .states = {buffers.first.get(), buffers.second.get()},
                    .finite = {buffers.word.get(), 0}};
    RunOp op(bench.backend, LinearSpec{.in = {shape.in_features, 1, 1}, .shape = shape}, n, type);
    for (int step = 0; step < steps; ++step) {
        const std::uint32_t stream = 10 + static_cast<std::uint32_t>(step);
        Floats x = random_floats(std::int64_t{n} * shape.in_features, stream);
        x[static_cast<std::size_t>(n / 2 * shape.in_features + 700)] = value;
        const TypedValues dev_x(bench, type, x);
        const TypedValues dy(bench, type,
                             random_floats(std::int64_t{n} * shape.out_features, stream + 100));
        const OpIo io = buffers.io(dev_x, dy);
        if (at_once) {
            REQUIRE(op.op().can_update(op.batch));
            op.op().backward_update(op.batch, io, args, Buffers::kOffset);
            continue;
        }
        op.backward(io);
        const auto at = [](const Guarded& buffer) { return buffer.get() + Buffers::kOffset; };
        const std::int64_t elems = buffers.elems - Buffers::kOffset;
        UpdateArgs behind = args;
        behind.finite.first_elem = Buffers::kOffset;
        behind.states[0] += Buffers::kOffset;
        behind.states[1] += Buffers::kOffset;
        bench.backend.update(behind, elems, at(buffers.params), at(buffers.grads));
    }
    if (at_once) {  // gradients are not stored, and padding is not touched
        const Floats grads = buffers.grads.download();
        CHECK(std::all_of(grads.begin(), grads.end(), [](float g) { return g == 0.0f; }));
    }
    Outcome outcome{buffers.params.download(), buffers.first.download(), buffers.second.download()};
    bench.backend.download(&outcome.word, buffers.word.get(), sizeof outcome.word);
    // The optimizer also updates padding, where a net has zeros.
    for (Floats* all : {&outcome.params, &outcome.first, &outcome.second}) {
        for (const auto& [from, to] :
             {std::pair{Buffers::kOffset + shape.weight_elems(), buffers.bias},
              {buffers.bias + shape.out_features, buffers.elems}}) {
            std::fill(all->begin() + from, all->begin() + to, 0.0f);
        }
    }
    return outcome;
}

}  // namespace

TEST_CASE("a large linear layer updates its weights as the optimizer would, bit for bit",
          "[update][gpu][emulated]") {
    const auto test = [](Bench& bench) {
        int schedule = 0;
        const auto check = [&](const LinearShape& shape, const Rule& rule) {
            INFO(rule.name << ", " << shape.in_features << " -> " << shape.out_features);
            // Two slices of images, the second incomplete; for the other shape one slice.
            const int n = shape.in_features == kShapes[0].in_features ? 37 : 3;
            const Outcome parts = update(bench, shape, rule, 3, n, false);
            simt::emulator::set_schedule(static_cast<std::uint64_t>(schedule++));
            CHECK(update(bench, shape, rule, 3, n, true) == parts);
            simt::emulator::set_schedule(0);
            CHECK(parts.word == 0);
        };
        // The shapes in turn, as their tiles and a rule's formula do not depend on each other.
        for (const Rule& rule : kRules) {
            check(kShapes[schedule % 2], rule);
        }
        check(kShapes[1], kRules[0]);
        check(kShapes[0], kRules[1]);
    };
    on_tensor_cores(test, {0});
}

TEST_CASE("in bf16 a large linear layer also updates its weights, in fp16 it never does",
          "[update][gpu][emulated]") {
    const auto test = [](Bench& bench) {
        const LinearShape& shape = kShapes[0];
        for (const Rule& rule : {kRules[1], kRules[3]}) {
            INFO(rule.name);
            const auto updated = [&](bool at_once) {
                return update(bench, shape, rule, 2, 69, at_once, 0.5f, DataType::bfloat16);
            };
            const Outcome parts = updated(false);
            simt::emulator::set_schedule(3);
            CHECK(updated(true) == parts);
            simt::emulator::set_schedule(0);
            CHECK(parts.word == 0);
        }
        RunOp op(bench.backend, LinearSpec{.in = {shape.in_features, 1, 1}, .shape = shape}, 8,
                 DataType::float16);
        CHECK(!op.op().can_update(op.batch));
    };
    on_tensor_cores(test, {0});
}

TEST_CASE("a layer that updates also reports a gradient that is not finite", "[update][gpu]") {
    const auto test = [](Bench& bench) {
        for (const Rule& rule : kRules) {
            INFO(rule.name);
            const LinearShape& shape = kShapes[1];
            const float nan = std::numeric_limits<float>::quiet_NaN();
            const Outcome found = update(bench, shape, rule, 1, 3, true, nan);
            CHECK(found == update(bench, shape, rule, 1, 3, false, nan));
            // The weight of input 700 in the last row.
            const std::int64_t last =
                Buffers::kOffset + std::int64_t{shape.out_features - 1} * shape.in_features + 700;
            CHECK(found.word == 1 + last / FiniteCheck::kGrain);
        }
    };
    on_tensor_cores(test, {0});
}

TEST_CASE("layers of few tiles leave updates to the optimizer, with or without tensor cores",
          "[update]") {
    const auto backend = tensor_backend(), exact = make_emulated_backend({}),
               cpu = make_cpu_backend(1);
    const auto can = [](Backend& on, const LinearShape& shape, int n) {
        RunOp op(on, LinearSpec{.in = {shape.in_features, 1, 1}, .shape = shape}, 8);
        op.batch.n = n;
        return op.op().can_update(op.batch);
    };
    CHECK(can(*backend, kShapes[0], 8));
    CHECK(!can(*backend, kShapes[0], 0));    // without images the optimizer applies momentum
    CHECK(!can(*backend, {1920, 1020}, 8));  // 128 tiles: k would be divided for many images
    CHECK(!can(*backend, {1 << 16, 64}, 8));
    CHECK(!can(*exact, kShapes[0], 8));
    CHECK(!can(*cpu, kShapes[0], 8));
}

TEST_CASE("updates do not change a gap", "[update][gpu]") {
    on_every_backend([](Bench& bench) {
        constexpr std::int64_t kElems = 1003;
        const Floats start = random_floats(kElems, 1), g = random_floats(kElems, 2);
        const Floats moments(kElems, 0.5f);
        const StepScalars values{.learning_rate = 0.3f, .adam_step_size = 0.1f};
        const auto scalars = bench.array(std::vector<StepScalars>{values});
        for (const UpdateGap gap : {UpdateGap{0, 16}, {320, 480}, {992, 0}, {16, 976}}) {
            for (const Formula formula :
                 {Formula::sgd, Formula::sgd_momentum, Formula::adam, Formula::lion}) {
                INFO("formula " << static_cast<int>(formula) << ", gap at " << gap.begin << " of "
                                << gap.elems);
                const auto run = [&](const UpdateGap& left_out, Floats gradients) {
                    const Guarded p = bench.vector(start), m = bench.vector(moments),
                                  v = bench.vector(moments), dev_g = bench.vector(gradients);
                    const auto word = bench.array(std::vector<std::int32_t>(1));
                    const FiniteCheck finite{word.get(), 32};
                    bench.backend.update({.formula = formula,
                                          .scalars = scalars.get(),
                                          .momentum = 0.9f,
                                          .states = {m.get(), v.get()},
                                          .finite = finite,
                                          .gap = left_out},
                                         kElems, p.get(), dev_g.get());
                    std::int32_t found = -1;
                    bench.backend.download(&found, word.get(), sizeof found);
                    return Outcome{p.download(), m.download(), v.download(), found};
                };
                Outcome expected = run({}, g);
                Floats bad = g;  // the gap is not checked
                for (std::int64_t i = gap.begin; i < gap.begin + gap.elems; ++i) {
                    const auto at = static_cast<std::size_t>(i);
                    bad[at] = std::numeric_limits<float>::quiet_NaN();
                    expected.params[at] = start[at];
                    expected.first[at] = expected.second[at] = 0.5f;
                }
                CHECK(run(gap, bad) == expected);
                bad[1002] = std::numeric_limits<float>::infinity();
                CHECK(run(gap, bad).word == 1 + (32 + 1002) / 16);
            }
        }
    });
}
