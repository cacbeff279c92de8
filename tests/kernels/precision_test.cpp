// 16-bit values: operations between conversions, and the decision about a step's update.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <utility>

#include "kernels/ops/converted_op.hpp"
#include "tests/support/backends.hpp"
#include "tests/support/catch.hpp"

using namespace gyre;
using namespace gyre::test;

namespace {

constexpr int kImages = 19;  // more than a block of the CPU's, and not a multiple of it

// One operation with all its memory, on 16-bit values between conversions or in float32.
struct Running {
    Running(Backend& backend_, const OpSpec& spec, DataType type_)
        : backend(backend_), type(type_), memory(backend_) {
        op = make_op(memory, "op", spec, {.train_images = kImages, .eval_images = kImages}, type);
        memory.allocate();
        in = std::visit(
            [](const auto& s) {
                if constexpr (requires { s.shape.in; }) {
                    return s.shape.in;
                } else {
                    return s.in;
                }
            },
            spec);
        in2 = std::visit(
            [&](const auto& s) {
                if constexpr (requires { s.in2; }) {
                    return s.in2;
                } else {
                    return in;
                }
            },
            spec);
        out = std::visit([](const auto& s) { return s.out(); }, spec);
        needs = op->needs();
        for (auto* tensor : {&x, &dx}) {
            *tensor = {backend, backend.activation_elems(in, kImages)};
        }
        for (auto* tensor : {&x2, &dx2}) {
            *tensor = {backend, backend.activation_elems(in2, kImages)};
        }
        for (auto* tensor : {&y, &dy}) {
            *tensor = {backend, backend.activation_elems(out, kImages)};
        }
        saved = {backend, static_cast<std::int64_t>(needs.saved_bytes)};
    }
    // A tensor in memory for floats, of which 16-bit values use half.
    Tensor tensor(const DeviceBuffer<float>& buffer) const { return {buffer.get(), type}; }
    void set(const Shape& shape, const DeviceBuffer<float>& to, const Floats& values) {
        const std::int64_t elems = backend.activation_elems(shape, kImages);
        DeviceBuffer<float> wide(backend, elems);
        backend.import_activation(shape, kImages, values.data(), wide.get());
        if (type == DataType::float32) {
            backend.copy(to.get(), wide.get(), wide.bytes());
        } else {
            backend.narrow(type, elems, wide.get(), tensor(to).narrow());
        }
    }
    Floats get(const Shape& shape, const DeviceBuffer<float>& from) {
        const std::int64_t elems = backend.activation_elems(shape, kImages);
        DeviceBuffer<float> wide(backend, elems);
        if (type == DataType::float32) {
            backend.copy(wide.get(), from.get(), wide.bytes());
        } else {
            backend.widen(type, elems, tensor(from).narrow(), wide.get());
        }
        Floats values(static_cast<std::size_t>(kImages * shape.elems()));
        backend.export_activation(shape, kImages, wide.get(), values.data());
        return values;
    }

    Backend& backend;
    const DataType type;
    WideMemory memory;
    std::unique_ptr<Op> op;
    Shape in, in2, out;
    OpNeeds needs;
    DeviceBuffer<float> x, x2, y, dy, dx, dx2;
    DeviceBuffer<std::byte> saved;
};

// A normalisation's parameters stay in float32.
bool is_norm(const OpSpec& spec) {
    return std::holds_alternative<BatchNorm2dSpec>(spec) ||
           std::holds_alternative<GroupNormSpec>(spec);
}

// The numbers of elements of weight and bias.
std::pair<std::int64_t, std::int64_t> parameter_elems(const OpSpec& spec, const Shape& in,
                                                      const Shape& out) {
    if (const auto* conv = std::get_if<Conv2dSpec>(&spec)) {
        return {conv->shape.weight_elems(), conv->shape.out_channels};
    }
    if (const auto* conv = std::get_if<GroupedConv2dSpec>(&spec)) {
        return {conv->shape.weight_elems(), conv->shape.out_channels};
    }
    if (const auto* linear = std::get_if<LinearSpec>(&spec)) {
        return {linear->shape.weight_elems(), out.channels};
    }
    const std::int64_t channels = is_norm(spec) ? in.channels : 0;
    return {channels, channels};
}

// An operation's results, each value as stored.
struct Found {
    Floats y, dy, dx, dx2;  // dy: as the first part of the backward pass leaves it
    std::array<Floats, 2> grads;
};

// All operands are representable in `operands`, and so is y if the backward pass reads it.
Found run(Backend& backend, const OpSpec& spec, DataType type, DataType operands) {
    Running r(backend, spec, type);
    const auto rounded = [&](Floats values) {
        Bench bench(backend);
        const Guarded from = bench.vector(values), to = bench.vector(values);
        backend.round_to(operands, static_cast<std::int64_t>(values.size()), from.get(), to.get());
        return to.download();
    };
    const auto [weights, biases] = parameter_elems(spec, r.in, r.out);
    const bool product = !is_norm(spec);
    Bench bench(backend);
    Floats w = random_floats(weights, 3);
    // In float32, the weight is rounded in advance as an operand of 16 bits is.
    const Guarded weight = bench.vector(type == DataType::float32 && product ? rounded(w) : w);
    const Guarded bias = bench.vector(random_floats(biases, 4));
    const Guarded dw = bench.empty(weights), db = bench.empty(biases);
    const Guarded mean = bench.vector(Floats(static_cast<std::size_t>(r.in.channels), 0.0f));
    const Guarded variance = bench.vector(Floats(static_cast<std::size_t>(r.in.channels), 1.0f));
    r.set(r.in, r.x, rounded(random_floats(kImages * r.in.elems(), 1)));
    r.set(r.in2, r.x2, rounded(random_floats(kImages * r.in2.elems(), 2)));
    r.set(r.out, r.dy, rounded(random_floats(kImages * r.out.elems(), 5)));
    std::vector<std::int32_t> indices(kImages);
    std::iota(indices.begin(), indices.end(), 7);
    const auto samples = bench.array(indices);
    const Batch batch{.n = kImages, .training = true, .samples = samples.get(), .seed = 5};
    OpIo io{.x = r.tensor(r.x),
            .y = r.tensor(r.needs.in_place ? r.x : r.y),
            .dy = r.tensor(r.dy),
            .dx = r.tensor(r.needs.in_place ? r.dy : r.dx),
            .saved = r.saved.get(),
            .params = {weight.get(), bias.get()},
            .grads = {dw.get(), db.get()},
            .state = {mean.get(), variance.get()}};
    if (std::holds_alternative<AddSpec>(spec) || r.needs.writes_dx2) {
        io.x2 = r.tensor(r.x2);
    }
    if (r.needs.writes_dx2) {
        io.dx2 = r.tensor(r.dx2);
    }
    r.op->forward(batch, io);
    Found found;
    const DeviceBuffer<float>& y = r.needs.in_place ? r.x : r.y;
    found.y = rounded(r.get(r.out, y));
    r.set(r.out, y, found.y);  // as the backward pass reads it
    // Memory shared with other operations does not keep its contents.
    const Floats lost(static_cast<std::size_t>(r.memory.elems()),
                      std::numeric_limits<float>::quiet_NaN());
    backend.upload(r.memory.get(), lost.data(), lost.size() * sizeof(float));
    r.op->backward_begin(batch, io);
    found.dy = rounded(r.get(r.out, r.dy));
    if (weights > 0) {
        r.op->backward_params(batch, io);
        found.grads = {dw.download(), db.download()};
    }
    r.op->backward_input(batch, io);
    found.dx = rounded(r.get(r.in, r.needs.in_place ? r.dy : r.dx));
    if (r.needs.writes_dx2) {
        found.dx2 = rounded(r.get(r.in2, r.dx2));
    }
    return found;
}

bool same_bytes(const Floats& a, const Floats& b) {
    return a.size() == b.size() &&
           (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0);
}

const std::vector<OpSpec> kSpecs = {
    Conv2dSpec{.shape = {{3, 9, 9}, 5, 3, 2, 1}},
    Conv2dSpec{.shape = {{32, 8, 8}, 32, 3, 1, 1}},
    Conv2dSpec{.shape = {{32, 8, 8}, 32, 3, 1, 1}, .relu = true},
    Conv2dSpec{.shape = {{2, 10, 10}, 4, 3, 1, 0},
               .dropout = 0.5f,
               .pool_kernel = 2,
               .pool_stride = 2,
               .relu = true},
    GroupedConv2dSpec{{{6, 9, 9}, 6, 3, 1, 1, 6}},
    LinearSpec{{6, 3, 3}, {54, 11}},
    LinearSpec{{64, 1, 1}, {64, 64}, true},
    MaxPool2dSpec{{{4, 7, 8}, 2, 2}},
    AvgPool2dSpec{.in = {4, 6, 6}},
    ReluSpec{{5, 4, 3}},
    ActivationSpec{.in = {5, 4, 3}, .function = Activation::gelu},
    ActivationSpec{{5, 4, 3}, Activation::leaky_relu, 0.25f},
    DropoutSpec{.in = {5, 4, 3}},
    BatchNorm2dSpec{.in = {5, 4, 3}},
    AddSpec{{5, 4, 3}},
    MulSpec{{5, 1, 1}, {5, 4, 3}},
    ConcatSpec{{5, 4, 3}, {2, 4, 3}},
    ChannelsSpec{{6, 4, 3}, 0, 6, 2},
    GroupNormSpec{{6, 4, 3}, 2},
};

}  // namespace

TEST_CASE("an operation in 16 bits rounds the float32 result of rounded operands", "[gpu]") {
    on_every_backend([](Bench& bench) {
        std::size_t converted = 0;
        for (const DataType type : {DataType::bfloat16, DataType::float16}) {
            for (const OpSpec& spec : kSpecs) {
                INFO(name_of(type) << ", operation " << &spec - kSpecs.data());
                const OpSizes sizes{.train_images = kImages};
                const bool product = std::holds_alternative<Conv2dSpec>(spec) ||
                                     std::holds_alternative<LinearSpec>(spec);
                if ((product && bench.backend.make("op", spec, sizes, type) != nullptr) ||
                    bench.backend.make("op", spec, sizes) == nullptr) {
                    continue;  // the backend has its own, which adds up in another order, or none
                }
                ++converted;
                const Found wide = run(bench.backend, spec, DataType::float32, type);
                const Found narrow = run(bench.backend, spec, type, type);
                CHECK(same_bytes(narrow.y, wide.y));
                CHECK(same_bytes(narrow.dy, wide.dy));
                CHECK(same_bytes(narrow.dx, wide.dx));
                CHECK(same_bytes(narrow.dx2, wide.dx2));
                CHECK(same_bytes(narrow.grads[0], wide.grads[0]));
                CHECK(same_bytes(narrow.grads[1], wide.grads[1]));
                CHECK(norm(narrow.y) > 0.0);
                CHECK(norm(narrow.dx) > 0.0);
            }
        }
        CHECK(converted >= kSpecs.size() / 2);
    });
}

TEST_CASE("a step is decided by GradScaler's rule, and Adam counts only updates made", "[gpu]") {
    on_every_backend([](Bench& bench) {
        Backend& backend = bench.backend;
        const LossScaling rule{.init_scale = 8.0f, .growth_interval = 2};
        DeviceBuffer<LossScale> state(backend, 1);
        LossScale start;
        start.scale = rule.init_scale;
        backend.upload(state.get(), &start, sizeof start);
        DeviceBuffer<StepScalars> scalars(backend, 1);
        DeviceBuffer<float> results(backend, 2);
        DeviceBuffer<std::int32_t> word(backend, 1);
        const float beta1 = 0.9f, beta2 = 0.99f, rate = 0.25f;
        // There are three ranks; the first and the last find something in turn.
        DeviceBuffer<GradientFacts> facts(backend, 3);
        const LossScaleArgs args{.rule = rule,
                                 .state = state.get(),
                                 .of_ranks = facts.get(),
                                 .ranks = 3,
                                 .scalars = scalars.get(),
                                 .beta1 = beta1,
                                 .beta2 = beta2,
                                 .not_finite = word.get(),
                                 .next_scale = results.get(),
                                 .skips = results.get() + 1};
        struct Step {
            bool overflows;
            float next_scale;
            int updates;
        };
        float scale = rule.init_scale;
        int number = 0;
        for (const Step& step : {Step{false, 8, 1},
                                 {false, 16, 2},
                                 {true, 8, 2},
                                 {true, 4, 2},
                                 {false, 4, 3},
                                 {false, 8, 4},
                                 {false, 8, 5},
                                 {true, 4, 5},
                                 {false, 4, 6},  // the update before the overflow does not count
                                 {false, 8, 7}}) {
            INFO("step " << ++number);
            const int rank = number % 2 * 2;
            for (const std::int64_t elems : {1, 7, 70'003}) {  // of one step, in pieces
                Floats g = random_floats(elems, 6);
                // Among the elements processed in fours, or after them.
                const auto inf =
                    static_cast<std::size_t>(step.updates == 2 ? elems / 2 : elems - 1);
                if (step.overflows && elems == 7) {
                    g[inf] = std::numeric_limits<float>::infinity();
                }
                const Guarded dev = bench.vector(g);
                backend.unscale(elems, state.get(), {&facts.get()[rank].not_finite}, dev.get());
                for (float& value : g) {
                    value = std::isfinite(value) ? value / scale : 0.0f;
                }
                CHECK(same_bytes(dev.download(), g));
            }
            const StepScalars given{.learning_rate = rate,
                                    .adam_step_size = 3.0f,
                                    .adam_correction = 5.0f,
                                    .shrink = 7.0f};
            backend.upload(scalars.get(), &given, sizeof given);
            backend.decide_step(args);
            LossScale now;
            backend.download(&now, state.get(), sizeof now);
            std::array<float, 2> found{};
            backend.download(found.data(), results.get(), sizeof found);
            CHECK(now.scale == step.next_scale);
            CHECK(found[0] == step.next_scale);
            CHECK(found[1] == (step.overflows ? 1.0f : 0.0f));
            CHECK((now.skip != 0) == step.overflows);
            std::array<GradientFacts, 3> left{};
            backend.download(left.data(), facts.get(), sizeof left);
            CHECK(left.at(static_cast<std::size_t>(rank)).not_finite == 0);
            CHECK(now.updates == step.updates);
            if (now.skipped == 0) {
                CHECK(now.scalars == given);
            } else {
                const double first = 1.0 - std::pow(double{beta1}, step.updates);
                const double second = 1.0 - std::pow(double{beta2}, step.updates);
                CHECK(double{now.scalars.adam_step_size} ==
                      Approx(double{rate} / first).epsilon(1e-6));
                CHECK(double{now.scalars.adam_correction} ==
                      Approx(1.0 / std::sqrt(second)).epsilon(1e-6));
                CHECK(now.scalars.shrink == 7.0f);
                CHECK(now.scalars.learning_rate == rate);
            }
            scale = step.next_scale;
        }
        // Below the least scale, an overflow is an error.
        std::int32_t reported = 0;
        backend.download(&reported, word.get(), sizeof reported);
        CHECK(reported == 0);
        LossScale least;
        least.scale = LossScaling::kLeastScale;
        backend.upload(state.get(), &least, sizeof least);
        std::array<GradientFacts, 3> found{};
        found[1].not_finite = 5;
        found[2].not_finite = 3;
        backend.upload(facts.get(), found.data(), sizeof found);
        backend.decide_step(args);
        backend.download(&reported, word.get(), sizeof reported);
        CHECK(reported == 5);
    });
}

TEST_CASE("a skipped update leaves parameters and moments as they are", "[gpu]") {
    on_every_backend([](Bench& bench) {
        for (const std::int32_t skips : {0, 1}) {
            for (const std::int64_t elems : {5, 4099}) {
                const auto skip = bench.array(std::vector<std::int32_t>{skips});
                const auto scalars = bench.array(std::vector<StepScalars>{
                    {.learning_rate = 0.1f, .adam_step_size = 0.1f, .adam_correction = 1.0f}});
                const Floats values = random_floats(elems, 8);
                const Guarded g = bench.vector(random_floats(elems, 9));
                const auto check = [&](Formula formula, bool first, bool second) {
                    INFO("formula " << static_cast<int>(formula) << ", skips " << skips);
                    const Guarded p = bench.vector(values), m = bench.vector(values),
                                  v = bench.vector(Floats(values.size(), 0.5f));
                    bench.backend.update({.formula = formula,
                                          .scalars = scalars.get(),
                                          .momentum = 0.9f,
                                          .states = {m.get(), v.get()},
                                          .skip = skip.get()},
                                         elems, p.get(), g.get());
                    CHECK((p.download() == values) == (skips != 0));
                    CHECK((m.download() == values) == (skips != 0 || !first));
                    CHECK((v.download() == Floats(values.size(), 0.5f)) == (skips != 0 || !second));
                };
                check(Formula::sgd, false, false);
                check(Formula::sgd_momentum, true, false);
                check(Formula::adam, true, true);
                check(Formula::lion, true, false);
            }
        }
    });
}
