// The timed operations, each with its operands and the CPU's reference.
// Part of bench/kernels_gpu.cpp, compiled for GPUs and for the emulator like it.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "bench/gpu_operands.hpp"
#include "bench/kernels.hpp"

namespace gyre::SIMT_NAMESPACE {

// Gpu and Cpu have the same functions, for the GPU and for the reference on the CPU. op: made from
// the operation's spec, if it has one.
struct Gpu {
    const Context& context;
    Op* op;

    void gather(const GatherArgs& args, int n, float* x, std::int32_t* y) const {
        own::gather(context, args, n, x, y);
    }
    void cross_entropy(const CrossEntropyArgs& args, int n) const {
        own::cross_entropy(context, args, n);
    }
    void update(const UpdateArgs& args, std::int64_t elems, float* p, const float* g) const {
        own::update(context, args, elems, p, g);
    }
    void fill(std::int64_t elems, float value, float* x) const {
        own::fill(context, elems, value, x);
    }
    void clip_norm(std::int64_t elems, float most, GradientFacts* facts, float* x) const {
        own::fill(context, sizeof facts->squares / sizeof(float), 0.0f,
                  reinterpret_cast<float*>(&facts->squares));
        own::sum_of_squares(context, elems, x, {}, &facts->squares);
        own::scale_to_norm(context, {.most = most, .of_ranks = facts}, elems, x);
    }
    // Writes d_log_probabilities of a loss: -scale at the label, 0 elsewhere.
    void one_hot(int n, int classes, float scale, const std::int32_t* labels, float* to) const {
        std::vector<std::int32_t> host(static_cast<std::size_t>(n));
        context.stream.download(host.data(), labels, host.size() * sizeof(std::int32_t));
        context.stream.synchronize();
        std::vector<float> values(host.size() * static_cast<std::size_t>(classes));
        for (std::size_t i = 0; i < host.size(); ++i) {
            values[i * static_cast<std::size_t>(classes) + static_cast<std::size_t>(host[i])] =
                -scale;
        }
        context.stream.upload(to, values.data(), values.size() * sizeof(float));
        context.stream.synchronize();
    }
};
struct Cpu {
    Backend& backend;
    Op* op;

    void gather(const GatherArgs& args, int n, float* x, std::int32_t* y) const {
        backend.gather(args, n, x, y);
    }
    void cross_entropy(const CrossEntropyArgs& args, int n) const {
        backend.cross_entropy(args, n);
    }
    void update(const UpdateArgs& args, std::int64_t elems, float* p, const float* g) const {
        backend.update(args, elems, p, g);
    }
    void fill(std::int64_t elems, float value, float* x) const { std::fill_n(x, elems, value); }
    void clip_norm(std::int64_t elems, float most, GradientFacts* facts, float* x) const {
        backend.fill_zero(&facts->squares, sizeof facts->squares);
        backend.sum_of_squares(elems, x, {}, &facts->squares);
        backend.scale_to_norm({.most = most, .of_ranks = facts}, elems, x);
    }
    void one_hot(int, int, float, const std::int32_t*, float*) const {}
};

struct Operation {
    std::string net, layer, direction;
    std::vector<Operand> operands;
    double image_flop = 0, image_bytes = 0, fixed_bytes = 0;
    std::optional<OpSpec> spec;
    std::optional<OpSpec> timed_spec;  // only if it differs from spec
    std::function<void(const Gpu&, const Args&)> set_up, ours,
        vendor;  // the library's; it and set_up may be empty
    std::function<void(const Cpu&, const Args&)> cpu_set_up, reference;
    bool is_product = false;  // may round to TF32
};

// Makes the operation's Op from one set of kernels; null if it has no spec.
inline std::unique_ptr<Op> make(OpFactory& factory, const Operation& operation, int n,
                                bool timed = false) {
    const std::optional<OpSpec>& spec =
        timed && operation.timed_spec ? operation.timed_spec : operation.spec;
    return spec ? factory.make(operation.layer, *spec, {.train_images = n}) : nullptr;
}

template <typename Function>
inline void set_up_with(Operation& operation, Function function) {
    operation.set_up = function;
    operation.cpu_set_up = function;
}
// do_with() sets an operation that only gyre has, compare_with() one that the library has, too.
template <typename Function>
inline void do_with(Operation& operation, Function function) {
    operation.ours = function;
    operation.reference = function;
}
template <typename Function>
inline void compare_with(Operation& operation, Function function) {
    do_with(operation, function);
    operation.vendor = function;
}

// Makes the operations of a layer.
class Operations {
 public:
    Operations(std::string net, std::string layer)
        : net_(std::move(net)), layer_(std::move(layer)) {}
    std::vector<Operation> take() { return std::move(all_); }

    void operator()(const bench::GatherWork& work) {
        const Shape shape = work.shape;
        Operation& op = add("gather", 5.0 * elems(shape) + 12.0, 0);
        op.operands = {{Role::in,
                        Type::u8,
                        Values::any,
                        {kDatasetImages * shape.channels, shape.height, shape.width}},
                       {Role::in, Type::i32, Values::labels, {1, 1, kDatasetImages}},
                       indices(Values::samples),
                       vector(Role::in, shape.channels),
                       vector(Role::in, shape.channels),
                       images(Role::out, shape),
                       {Role::out, Type::i32, Values::any, {1, 1, 1}, true}};
        do_with(op, [shape](const auto& k, const Args& a) {
            k.gather({a.u8(0), a.i32(1), a.i32(2), shape, a.f(3), a.f(4)}, a.n, a.f(5), a.i32(6));
        });
    }

    void operator()(const bench::ConvWork& work) {
        const Conv2dShape& s = work.shape;
        weighted(Conv2dSpec{.shape = s}, s.in, s.out(), s.weight_elems(), s.out_channels,
                 s.flop_per_image(), work.input_gradient);
    }

    void operator()(const bench::LinearWork& work) {
        const LinearShape& s = work.shape;
        const LinearSpec spec{.in = {s.in_features, 1, 1}, .shape = s};
        weighted(spec, spec.in, spec.out(), s.weight_elems(), s.out_features, s.flop_per_image(),
                 true);
    }

    // The library has no argmax: its backward pass searches for the largest values again.
    void operator()(const bench::PoolWork& work) {
        const MaxPool2dShape& s = work.shape;
        const Operand argmax{Role::scratch, Type::u8, Values::any, s.out(), true};
        const double bytes = 4.0 * elems(s.in) + 5.0 * elems(s.out());
        const auto do_forward = [](const auto& k, const Args& a) {
            k.op->forward(a.batch(), {.x = a.f(0), .y = a.f(1), .saved = a.u8(2)});
        };
        Operation& forward = add("forward", bytes, 0, MaxPool2dSpec{s});
        forward.operands = {images(Role::in, s.in), images(Role::out, s.out()), argmax};
        compare_with(forward, do_forward);
        Operation& backward = add("backward", bytes, 0, MaxPool2dSpec{s});
        backward.operands = {images(Role::in, s.in), images(Role::scratch, s.out()), argmax,
                             images(Role::in, s.out()), images(Role::out, s.in)};
        set_up_with(backward, do_forward);
        compare_with(backward, [](const auto& k, const Args& a) {
            k.op->backward_input(a.batch(),
                                 {.x = a.f(0), .dy = a.f(3), .dx = a.f(4), .saved = a.u8(2)});
        });
    }

    void operator()(const bench::ReluWork& work) {
        const Shape& shape = work.shape;
        Operation& forward = add("forward", 8.0 * elems(shape), 0, ReluSpec{shape});
        forward.operands = {images(Role::in_out, shape)};
        do_with(forward, [](const auto& k, const Args& a) {
            k.op->forward(a.batch(), {.x = a.f(0), .y = a.f(0)});
        });
        Operation& backward = add("backward", 12.0 * elems(shape), 0, ReluSpec{shape});
        backward.operands = {images(Role::in, shape), images(Role::in_out, shape)};
        do_with(backward, [](const auto& k, const Args& a) {
            k.op->backward_input(a.batch(), {.y = a.f(0), .dy = a.f(1), .dx = a.f(1)});
        });
    }

    void operator()(const bench::AvgPoolWork& work) {
        const AvgPool2dSpec& s = work.spec;
        const double bytes = 4.0 * (elems(s.in) + elems(s.out()));
        Operation& forward = add("forward", bytes, 0, s);
        forward.operands = {images(Role::in, s.in), images(Role::out, s.out())};
        do_with(forward, [](const auto& k, const Args& a) {
            k.op->forward(a.batch(), {.x = a.f(0), .y = a.f(1)});
        });
        Operation& backward = add("backward", bytes, 0, s);
        backward.operands = {images(Role::in, s.out()), images(Role::out, s.in)};
        do_with(backward, [](const auto& k, const Args& a) {
            k.op->backward_input(a.batch(), {.dy = a.f(0), .dx = a.f(1)});
        });
    }

    // Data read for the statistics or sums must be read again for the result. With momentum 1 the
    // running statistics become the batch's, however often the same memory is passed.
    void operator()(const bench::BatchNormWork& work) {
        const Shape& shape = work.shape;
        const BatchNorm2dSpec spec{.in = shape, .momentum = 1.0f};
        const int c = shape.channels;
        const double fixed_bytes = 4.0 * 8 * c;
        const auto operands = [&](Role y, Role state) {
            return std::vector<Operand>{
                images(Role::in, shape), images(y, shape), vector(Role::in, c),
                vector(Role::in, c),     vector(state, c), vector(state, c, Values::positive)};
        };
        const auto do_forward = [](const auto& k, const Args& a, const Batch& batch, void* saved) {
            k.op->forward(batch, {.x = a.f(0),
                                  .y = a.f(1),
                                  .saved = saved,
                                  .params = {a.f(2), a.f(3)},
                                  .state = {a.f(4), a.f(5)}});
        };
        const auto train = [=](const auto& k, const Args& a) {
            do_forward(k, a, a.batch(), a.f(6));
        };
        // This holds mean and deviation, with room for the library to align them.
        const Operand saved = vector(Role::scratch, 2 * (c + 16));
        Operation& forward = add("forward", 12.0 * elems(shape), fixed_bytes, spec);
        forward.operands = operands(Role::out, Role::in_out);
        forward.operands.push_back(saved);
        compare_with(forward, train);
        Operation& evaluation = add("evaluation", 8.0 * elems(shape), fixed_bytes, spec);
        evaluation.operands = operands(Role::out, Role::in);
        compare_with(evaluation,
                     [=](const auto& k, const Args& a) { do_forward(k, a, {.n = a.n}, nullptr); });
        Operation& backward = add("backward", 20.0 * elems(shape), fixed_bytes, spec);
        backward.operands = operands(Role::scratch, Role::scratch);
        backward.operands.insert(backward.operands.end(),
                                 {saved, images(Role::in, shape), images(Role::out, shape),
                                  vector(Role::out, c), vector(Role::out, c)});
        set_up_with(backward, train);
        compare_with(backward, [](const auto& k, const Args& a) {
            const OpIo io{.x = a.f(0),
                          .dy = a.f(7),
                          .dx = a.f(8),
                          .saved = a.f(6),
                          .params = {a.f(2), a.f(3)},
                          .grads = {a.f(9), a.f(10)}};
            k.op->backward_begin(a.batch(), io);
            k.op->backward_params(a.batch(), io);
            k.op->backward_input(a.batch(), io);
        });
    }

    // The gradient passes to both inputs unchanged.
    void operator()(const bench::AddWork& work) {
        Operation& op = add("forward", 12.0 * elems(work.shape), 0, AddSpec{work.shape});
        op.operands = {images(Role::in_out, work.shape), images(Role::in, work.shape)};
        do_with(op, [](const auto& k, const Args& a) {
            k.op->forward(a.batch(), {.x = a.f(0), .y = a.f(0), .x2 = a.f(1)});
        });
    }

    void operator()(const bench::DropoutWork& work) {
        const DropoutSpec spec{
            .in = work.shape, .probability = 0.5f, .by_channel = work.by_channel};
        Operation& op = add("both", 8.0 * elems(work.shape) + 4.0, 0, spec);
        DropoutSpec timed = spec;
        timed.probability = 1e-6f;  // values stay normal numbers, call after call
        op.timed_spec = timed;
        op.operands = {images(Role::in_out, work.shape), indices(Values::samples)};
        do_with(op, [](const auto& k, const Args& a) {
            Batch batch = a.batch();
            batch.samples = a.i32(1);
            batch.seed = 1;
            k.op->forward(batch, {.x = a.f(0), .y = a.f(0)});
        });
    }

    // The library's log-softmax and its gradient get a ready gradient of the loss and do not sum
    // the loss.
    void operator()(const bench::LossWork& work) {
        const int classes = work.classes;
        const Shape shape{classes, 1, 1};
        constexpr float kScale = 0.01f;
        Operation& op = add("both", 8.0 * classes + 4.0, 0);
        Operand sums = vector(Role::out, 2);
        sums.ours_alone = true;
        op.operands = {images(Role::in, shape),      indices(Values::labels),
                       images(Role::out, shape),     sums,
                       images(Role::scratch, shape), images(Role::scratch, shape)};
        set_up_with(op, [=](const auto& k, const Args& a) {
            k.one_hot(a.n, classes, kScale, a.i32(1), a.f(5));
        });
        do_with(op, [=](const auto& k, const Args& a) {
            k.cross_entropy({classes, a.f(0), a.i32(1), kScale, a.f(2), a.f(3)}, a.n);
        });
#if defined(GYRE_EMULATED)
        op.vendor = op.ours;
#else
        op.vendor = [=, softmax = std::shared_ptr<LogSoftmax>()](const Gpu& k,
                                                                 const Args& a) mutable {
            if (!softmax) {
                softmax = std::make_shared<LogSoftmax>(k.context);
            }
            softmax->forward_backward(a.n, classes, a.f(0), a.f(4), a.f(5), a.f(2));
        };
#endif
    }

    void operator()(const bench::ParameterWork& work) {
        const std::int64_t elems = work.elems;
        const auto bytes = static_cast<double>(elems);
        Operation& sgd = add("sgd", 0, 20.0 * bytes);
        const auto scalars =
            vector(Role::in, sizeof(StepScalars) / sizeof(float), Values::positive);
        sgd.operands = {vector(Role::in_out, elems), vector(Role::in, elems),
                        vector(Role::in_out, elems), scalars};
        do_with(sgd, [=](const auto& k, const Args& a) {
            k.update({.formula = Formula::sgd_momentum,
                      .scalars = reinterpret_cast<const StepScalars*>(a.f(3)),
                      .momentum = 0.5f,
                      .states = {a.f(2)}},
                     elems, a.f(0), a.f(1));
        });
        Operation& adam = add("adam", 0, 28.0 * bytes);
        adam.operands = {vector(Role::in_out, elems), vector(Role::in, elems),
                         vector(Role::in_out, elems), vector(Role::in_out, elems, Values::positive),
                         scalars};
        do_with(adam, [=](const auto& k, const Args& a) {
            k.update({.formula = Formula::adam,
                      .scalars = reinterpret_cast<const StepScalars*>(a.f(4)),
                      .states = {a.f(2), a.f(3)}},
                     elems, a.f(0), a.f(1));
        });
        Operation& fill = add("fill", 0, 4.0 * bytes);
        fill.operands = {vector(Role::out, elems)};
        do_with(fill, [=](const auto& k, const Args& a) { k.fill(elems, 0.5f, a.f(0)); });
        // The values are read for the norm, then read and written.
        Operation& clip = add("clip_norm", 0, 12.0 * bytes);
        clip.operands = {vector(Role::in_out, elems),
                         vector(Role::scratch, sizeof(GradientFacts) / sizeof(float))};
        do_with(clip, [=](const auto& k, const Args& a) {
            k.clip_norm(elems, a.timed ? 1e30f : 1.0f, reinterpret_cast<GradientFacts*>(a.f(1)),
                        a.f(0));
        });
    }

 private:
    static double elems(const Shape& shape) {
        return static_cast<double>(shape.elems());
    }

    // The reference is valid until the next call.
    Operation& add(const char* direction, double image_bytes, double fixed_bytes,
                   const std::optional<OpSpec>& spec = {}) {
        Operation& op = all_.emplace_back();
        op.net = net_;
        op.layer = layer_;
        op.direction = direction;
        op.image_bytes = image_bytes;
        op.fixed_bytes = fixed_bytes;
        op.spec = spec;
        return op;
    }

    // The three directions of a layer with weights.
    void weighted(const OpSpec& spec, const Shape& in, const Shape& out, std::int64_t weights,
                  std::int64_t bias, std::int64_t flop, bool input_gradient) {
        const double image_bytes = 4.0 * (elems(in) + elems(out));
        const double w_bytes = 4.0 * static_cast<double>(weights);
        const double b_bytes = 4.0 * static_cast<double>(bias);
        const auto product = [&](const char* direction, double fixed_bytes,
                                 std::vector<Operand> operands, auto body) {
            Operation& op = add(direction, image_bytes, fixed_bytes, spec);
            op.operands = std::move(operands);
            op.image_flop = static_cast<double>(flop);
            op.is_product = true;
            compare_with(op, body);
        };
        product(
            "forward", w_bytes + b_bytes,
            {images(Role::in, in), vector(Role::in, weights), vector(Role::in, bias),
             images(Role::out, out)},
            [](const auto& k, const Args& a) {
                k.op->forward(a.batch(), {.x = a.f(0), .y = a.f(3), .params = {a.f(1), a.f(2)}});
            });
        if (input_gradient) {
            product("backward_data", w_bytes,
                    {images(Role::in, out), vector(Role::in, weights), images(Role::out, in)},
                    [](const auto& k, const Args& a) {
                        k.op->backward_input(a.batch(),
                                             {.dy = a.f(0), .dx = a.f(2), .params = {a.f(1)}});
                    });
        }
        product("backward_weights", w_bytes + b_bytes,
                {images(Role::in, in), images(Role::in, out), vector(Role::out, weights),
                 vector(Role::out, bias)},
                [](const auto& k, const Args& a) {
                    k.op->backward_params(a.batch(),
                                          {.x = a.f(0), .dy = a.f(1), .grads = {a.f(2), a.f(3)}});
                });
    }

    const std::string net_, layer_;
    std::vector<Operation> all_;
};

}  // namespace gyre::SIMT_NAMESPACE
