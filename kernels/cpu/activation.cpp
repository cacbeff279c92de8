// Activation functions on the CPU (formulas: kernels/ops/activations.hpp), element by element.
#include "kernels/ops/activations.hpp"

#include "kernels/cpu/ops.hpp"

namespace gyre::cpu {
namespace {

template <typename Function>
class ActivationOp final : public Op {
 public:
    ActivationOp(const Context& context, const Shape& shape, const Function& function)
        : context_(context), block_elems_(shape.elems() * kLanes), function_(function) {}

    OpNeeds needs() const override {
        return {.in_place = Function::kInPlace,
                .backward_reads_x = !Function::kInPlace,
                .backward_reads_y = Function::kInPlace};
    }

    void forward(const Batch& batch, const OpIo& io) override {
        const float* const x = (Function::kInPlace ? io.y : io.x).f32();
        context_.for_ranges(
            block_count(batch.n) * block_elems_,
            [x, y = io.y.f32(), function = function_](std::int64_t begin, std::int64_t end) {
                for (std::int64_t i = begin; i < end; ++i) {
                    y[i] = function.value(x[i]);
                }
            });
    }

    void backward_input(const Batch& batch, const OpIo& io) override {
        const float* const at = (Function::kInPlace ? io.y : io.x).f32();
        const float* const dy = (Function::kInPlace ? io.dx : io.dy).f32();
        context_.for_ranges(
            block_count(batch.n) * block_elems_,
            [at, dy, dx = io.dx.f32(), function = function_](std::int64_t begin, std::int64_t end) {
                for (std::int64_t i = begin; i < end; ++i) {
                    dx[i] = dy[i] * function.derivative(at[i]);
                }
            });
    }

 private:
    const Context context_;
    const std::int64_t block_elems_;
    const Function function_;
};

}  // namespace

std::unique_ptr<Op> make_op(const Context& context, const ActivationSpec& spec, const OpSizes&) {
    return with_activation(spec, [&](const auto& function) -> std::unique_ptr<Op> {
        using Function = std::decay_t<decltype(function)>;
        return std::make_unique<ActivationOp<Function>>(context, spec.in, function);
    });
}

}  // namespace gyre::cpu
