// ReLU in place: y = max(y, 0), and dy = 0 where y <= 0. NaN stays NaN.
//
// Memory-bound. Forward: 8 bytes an element (read, write); backward: 12. One thread to 4 elements
// (16-byte accesses).
#include "kernels/cuda/elementwise.cuh"
#include "kernels/cuda/kernels.hpp"

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

}  // namespace

void relu_forward(const Context& context, std::int64_t elems, float* y) {
    launch_elementwise("relu_forward", relu_forward_kernel, context, elems, y);
}

void relu_backward(const Context& context, std::int64_t elems, const float* y, float* dy) {
    launch_elementwise("relu_backward", relu_backward_kernel, context, elems, y, dy);
}

}  // namespace gyre::SIMT_NAMESPACE
