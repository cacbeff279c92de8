// ReLU in place: y = max(y, 0); backward: dy = 0 where y <= 0, else factor * dy. NaN stays NaN.
//
// Memory-bound. Forward: 8 bytes per element (read, write); backward: 12. One thread per 4 elements
// (16-byte accesses).
#include "kernels/cuda/elementwise.cuh"
#include "kernels/cuda/ops.hpp"
#include "kernels/cuda/tensor_math.cuh"

namespace gyre::SIMT_NAMESPACE {
namespace {

__device__ __forceinline__ float clip(float value, float where) {
    return where <= 0.0f ? 0.0f : value;
}

__global__ void relu_forward_kernel(std::int64_t elems, float* y) {
    for_my_quad(
        elems,
        [=](std::int64_t i) {
            const float4 v = load4(y + i);
            store4(y + i,
                   make_float4(clip(v.x, v.x), clip(v.y, v.y), clip(v.z, v.z), clip(v.w, v.w)));
        },
        [=](std::int64_t i) { y[i] = clip(y[i], y[i]); });
}

__global__ void relu_backward_kernel(std::int64_t elems, float factor, const float* y, float* dy) {
    for_my_quad(
        elems,
        [=](std::int64_t i) {
            const float4 v = load4(y + i), d = load4(dy + i);
            store4(dy + i, make_float4(clip(d.x * factor, v.x), clip(d.y * factor, v.y),
                                       clip(d.z * factor, v.z), clip(d.w * factor, v.w)));
        },
        [=](std::int64_t i) { dy[i] = clip(dy[i] * factor, y[i]); });
}

// For 16-bit types.
template <typename Math>
__global__ void narrow_relu_backward_kernel(std::int64_t elems, float factor,
                                            const std::uint16_t* y, std::uint16_t* dy) {
    const auto each = [=](std::int64_t i) {
        dy[i] = Math::value(clip(Math::load(dy[i]) * factor, Math::load(y[i])));
    };
    for_my_quad(
        elems,
        [=](std::int64_t i) {
            SIMT_UNROLL
            for (int j = 0; j < 4; ++j) {
                each(i + j);
            }
        },
        each);
}

class ReluOp final : public Op {
 public:
    ReluOp(const Context& context, const Shape& shape)
        : context_(context), image_elems_(shape.elems()) {}
    // A dropout after the ReLU may set some of y to zero; dy is zero there too, so the mask y > 0
    // still gives the right gradient.
    OpNeeds needs() const override {
        return {.in_place = true, .backward_reads_x = false, .backward_reads_y = true};
    }
    void forward(const Batch& batch, const OpIo& io) override {
        launch_elementwise("relu_forward", relu_forward_kernel, context_, image_elems_ * batch.n,
                           io.y.f32());
    }
    void backward_input(const Batch& batch, const OpIo& io) override {
        relu_backward(context_, image_elems_ * batch.n, 1.0f, io.y, io.dx);
    }

 private:
    const Context context_;
    const std::int64_t image_elems_;
};

}  // namespace

void relu_backward(const Context& context, std::int64_t elems, float factor, const Tensor& y,
                   const Tensor& dy) {
    if (y.type == DataType::float32) {
        launch_elementwise("relu_backward", relu_backward_kernel, context, elems, factor, y.f32(),
                           dy.f32());
    } else {
        launch_elementwise("relu_backward",
                           y.type == DataType::bfloat16 ? narrow_relu_backward_kernel<Bf16Math>
                                                        : narrow_relu_backward_kernel<F16Math>,
                           context, elems, factor, y.narrow(), dy.narrow());
    }
}

std::unique_ptr<Op> make_op(const Context& context, const ReluSpec& spec, const OpSizes&) {
    return std::make_unique<ReluOp>(context, spec.in);
}

}  // namespace gyre::SIMT_NAMESPACE
