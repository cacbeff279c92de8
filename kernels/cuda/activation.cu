// Activation functions (formulas: kernels/ops/activations.hpp) of flat arrays of n * elems:
//   y = f(x);  dx = dy * f'(x), or f' as a function of y for those in place.
//
// Memory-bound. Forward: 8 bytes per element (read, write); backward: 12. One thread per 4 elements
// (16-byte accesses); 256 threads per block.
#include "kernels/ops/activations.hpp"

#include "kernels/cuda/elementwise.cuh"
#include "kernels/cuda/ops.hpp"

namespace gyre::SIMT_NAMESPACE {
namespace {

template <typename Function>
__global__ void activation_forward_kernel(std::int64_t elems, Function function, const float* x,
                                          float* y) {
    for_my_quad(
        elems,
        [=](std::int64_t i) {
            const float4 v = load4(x + i);
            store4(y + i, make_float4(function.value(v.x), function.value(v.y), function.value(v.z),
                                      function.value(v.w)));
        },
        [=](std::int64_t i) { y[i] = function.value(x[i]); });
}

template <typename Function>
__global__ void activation_backward_kernel(std::int64_t elems, Function function, const float* at,
                                           const float* dy, float* dx) {
    for_my_quad(
        elems,
        [=](std::int64_t i) {
            const float4 v = load4(at + i), d = load4(dy + i);
            store4(dx + i,
                   make_float4(d.x * function.derivative(v.x), d.y * function.derivative(v.y),
                               d.z * function.derivative(v.z), d.w * function.derivative(v.w)));
        },
        [=](std::int64_t i) { dx[i] = dy[i] * function.derivative(at[i]); });
}

template <typename Function>
class ActivationOp final : public Op {
 public:
    ActivationOp(const Context& context, const Shape& shape, const Function& function)
        : context_(context), image_elems_(shape.elems()), function_(function) {}

    OpNeeds needs() const override {
        return {.in_place = Function::kInPlace,
                .backward_reads_x = !Function::kInPlace,
                .backward_reads_y = Function::kInPlace};
    }
    void forward(const Batch& batch, const OpIo& io) override {
        const float* const x = (Function::kInPlace ? io.y : io.x).f32();
        launch_elementwise(Function::kForward, activation_forward_kernel<Function>, context_,
                           image_elems_ * batch.n, function_, x, io.y.f32());
    }
    void backward_input(const Batch& batch, const OpIo& io) override {
        const float* const at = (Function::kInPlace ? io.y : io.x).f32();
        const float* const dy = (Function::kInPlace ? io.dx : io.dy).f32();
        launch_elementwise(Function::kBackward, activation_backward_kernel<Function>, context_,
                           image_elems_ * batch.n, function_, at, dy, io.dx.f32());
    }

 private:
    const Context context_;
    const std::int64_t image_elems_;
    const Function function_;
};

}  // namespace

std::unique_ptr<Op> make_op(const Context& context, const ActivationSpec& spec, const OpSizes&) {
    return with_activation(spec, [&](const auto& function) -> std::unique_ptr<Op> {
        using Function = std::decay_t<decltype(function)>;
        return std::make_unique<ActivationOp<Function>>(context, spec.in, function);
    });
}

}  // namespace gyre::SIMT_NAMESPACE
