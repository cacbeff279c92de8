// ReLU in place: y = max(y, 0), and dy = 0 where y <= 0. NaN stays NaN.
//
// Memory-bound. Forward: 8 bytes an element (read, write); backward: 12. One thread to 4 elements
// (16-byte accesses).
#include "kernels/cuda/elementwise.cuh"
#include "kernels/cuda/ops.hpp"

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

__global__ void relu_backward_kernel(std::int64_t elems, const float* y, float* dy) {
    for_my_quad(
        elems,
        [=](std::int64_t i) {
            const float4 v = load4(y + i), d = load4(dy + i);
            store4(dy + i,
                   make_float4(clip(d.x, v.x), clip(d.y, v.y), clip(d.z, v.z), clip(d.w, v.w)));
        },
        [=](std::int64_t i) { dy[i] = clip(dy[i], y[i]); });
}

class ReluOp final : public Op {
 public:
    ReluOp(const Context& context, const Shape& shape)
        : context_(context), image_elems_(shape.elems()) {}
    // A dropout after it may zero some of y: there dy is zero as well, so the mask y > 0 still
    // gives the right gradient.
    OpNeeds needs() const override {
        return {.in_place = true, .backward_reads_x = false, .backward_reads_y = true};
    }
    void forward(const Batch& batch, const OpIo& io) override {
        launch_elementwise("relu_forward", relu_forward_kernel, context_, image_elems_ * batch.n,
                           io.y.f32());
    }
    void backward_input(const Batch& batch, const OpIo& io) override {
        relu_backward(context_, image_elems_ * batch.n, io.y.f32(), io.dx.f32());
    }

 private:
    const Context context_;
    const std::int64_t image_elems_;
};

}  // namespace

void relu_backward(const Context& context, std::int64_t elems, const float* y, float* dy) {
    launch_elementwise("relu_backward", relu_backward_kernel, context, elems, y, dy);
}

std::unique_ptr<Op> make_op(const Context& context, const ReluSpec& spec, const OpSizes&) {
    return std::make_unique<ReluOp>(context, spec.in);
}

}  // namespace gyre::SIMT_NAMESPACE
