// Loss scaling (kernels/ops/loss_scale.hpp): g *= 1 / scale with a check of all g, followed by the
// decision about the update.
//
// A non-finite g becomes 0, so that computations on the whole buffer, such as clipping, do not
// spoil the padding between parameters, which no step writes.
//
// unscale: memory-bound, 8 bytes per element; one thread per 4 elements (16-byte accesses).
// decide_step: one thread of one warp; latency-bound.
#include "kernels/cuda/elementwise.cuh"
#include "kernels/cuda/kernels.hpp"

namespace gyre::SIMT_NAMESPACE {
namespace {

__global__ void unscale_kernel(std::int64_t elems, const LossScale* state, FiniteCheck finite,
                               float* g) {
    const float factor = 1.0f / state->scale;
    const auto unscaled = [=](float v) { return fabsf(v) <= 3.402823466e38f ? v * factor : 0.0f; };
    for_my_quad(
        elems,
        [=](std::int64_t i) {
            const float4 v = load4(g + i);
            check_finite(finite, i, v);
            store4(g + i, make_float4(unscaled(v.x), unscaled(v.y), unscaled(v.z), unscaled(v.w)));
        },
        [=](std::int64_t i) {
            check_finite(finite, i, g[i]);
            g[i] = unscaled(g[i]);
        });
}

__global__ void decide_step_kernel(LossScaleArgs args) {
    if (threadIdx.x == 0) {
        gyre::decide_step(args);
    }
}

}  // namespace

void unscale(const Context& context, std::int64_t elems, const LossScale* state,
             const FiniteCheck& finite, float* g) {
    launch_elementwise("unscale", unscale_kernel, context, elems, state, finite, g);
}

void decide_step(const Context& context, const LossScaleArgs& args) {
    launch("decide_step", decide_step_kernel, dim3(1), dim3(32), context.stream, args);
}

}  // namespace gyre::SIMT_NAMESPACE
