// Optimizer steps over the flat buffers, in one pass.
//   SGD:  d = g + decay p;  v = momentum v + d;  p -= lr (nesterov ? d + momentum v : v)
//   Adam: d = g + decay p;  m = beta1 m + (1 - beta1) d;  v = beta2 v + (1 - beta2) d^2
//         p -= lr / (1 - beta1^t) m / (sqrt(v / (1 - beta2^t)) + epsilon); AdamW shrinks p first by
//         1 - lr decay and has no decay in d
//
// Memory-bound. Bytes an element: SGD 12 (read p, g; write p), with momentum 20; Adam 28. FLOPs: 4,
// 8 and 14. One thread to 4 elements (16-byte accesses). What is the same for all elements is
// computed once, on the host; what of it changes from step to step is read from the device's memory
// (StepScalars). A gradient that is not finite is reported on the way (FiniteCheck).
#include "kernels/cuda/elementwise.cuh"
#include "kernels/cuda/kernels.hpp"
#include "kernels/cuda/optimizers.cuh"

namespace gyre::SIMT_NAMESPACE {
namespace {

__global__ void sgd_kernel(std::int64_t elems, SgdArgs a, float* p, const float* g) {
    const float rate = a.scalars->learning_rate;
    for_my_quad(
        elems,
        [=](std::int64_t i) {
            float4 p4 = load4(p + i);
            const float4 g4 = load4(g + i);
            check_finite(a.finite, i, g4);
            sgd(a, rate, p4.x, g4.x);
            sgd(a, rate, p4.y, g4.y);
            sgd(a, rate, p4.z, g4.z);
            sgd(a, rate, p4.w, g4.w);
            store4(p + i, p4);
        },
        [=](std::int64_t i) {
            check_finite(a.finite, i, g[i]);
            sgd(a, rate, p[i], g[i]);
        });
}

__global__ void sgd_momentum_kernel(std::int64_t elems, SgdArgs a, float* p, const float* g,
                                    float* velocity) {
    const float rate = a.scalars->learning_rate;
    for_my_quad(
        elems,
        [=](std::int64_t i) {
            float4 p4 = load4(p + i), v4 = load4(velocity + i);
            const float4 g4 = load4(g + i);
            check_finite(a.finite, i, g4);
            sgd(a, rate, p4.x, g4.x, v4.x);
            sgd(a, rate, p4.y, g4.y, v4.y);
            sgd(a, rate, p4.z, g4.z, v4.z);
            sgd(a, rate, p4.w, g4.w, v4.w);
            store4(p + i, p4);
            store4(velocity + i, v4);
        },
        [=](std::int64_t i) {
            check_finite(a.finite, i, g[i]);
            sgd(a, rate, p[i], g[i], velocity[i]);
        });
}

__global__ void adam_kernel(std::int64_t elems, Adam a, float* p, const float* g, float* m,
                            float* v) {
    const StepScalars s = *a.scalars;
    for_my_quad(
        elems,
        [=](std::int64_t i) {
            float4 p4 = load4(p + i), m4 = load4(m + i), v4 = load4(v + i);
            const float4 g4 = load4(g + i);
            check_finite(a.finite, i, g4);
            adam(a, s, p4.x, g4.x, m4.x, v4.x);
            adam(a, s, p4.y, g4.y, m4.y, v4.y);
            adam(a, s, p4.z, g4.z, m4.z, v4.z);
            adam(a, s, p4.w, g4.w, m4.w, v4.w);
            store4(p + i, p4);
            store4(m + i, m4);
            store4(v + i, v4);
        },
        [=](std::int64_t i) {
            check_finite(a.finite, i, g[i]);
            adam(a, s, p[i], g[i], m[i], v[i]);
        });
}

}  // namespace

void sgd_step(const Context& context, const SgdArgs& args, std::int64_t elems, float* p,
              const float* g, float* velocity) {
    if (velocity == nullptr) {
        launch_elementwise("sgd", sgd_kernel, context, elems, args, p, g);
    } else {
        launch_elementwise("sgd_momentum", sgd_momentum_kernel, context, elems, args, p, g,
                           velocity);
    }
}

void adam_step(const Context& context, const AdamArgs& args, std::int64_t elems, float* p,
               const float* g, float* m, float* v) {
    const Adam a = adam_of(args);
    launch_elementwise("adam", adam_kernel, context, elems, a, p, g, m, v);
}

}  // namespace gyre::SIMT_NAMESPACE
