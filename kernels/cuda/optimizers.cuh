// The update of one parameter p by its gradient g; formulas: optimizers.cu.
#pragma once

#include <cmath>

#include "kernels/backend.hpp"
#include "kernels/cuda/simt.hpp"

namespace gyre::SIMT_NAMESPACE {

__device__ __forceinline__ void sgd(const SgdArgs& a, float rate, float& p, float g) {
    p -= rate * (g + a.weight_decay * p);
}

__device__ __forceinline__ void sgd(const SgdArgs& a, float rate, float& p, float g,
                                    float& velocity) {
    const float d = g + a.weight_decay * p;
    velocity = a.momentum * velocity + d;
    p -= rate * (a.nesterov ? d + a.momentum * velocity : velocity);
}

struct Adam {
    float beta1, rest1;  // rest: 1 - beta
    float beta2, rest2;
    const StepScalars* scalars;
    float epsilon, decay;
    FiniteCheck finite;
};

__device__ __forceinline__ void adam(const Adam& a, const StepScalars& s, float& p, float g,
                                     float& m, float& v) {
    const float d = g + a.decay * p;
    m = a.beta1 * m + a.rest1 * d;
    v = a.beta2 * v + a.rest2 * d * d;
    p = p * s.adam_shrink - s.adam_step_size * m / (sqrtf(v) * s.adam_correction + a.epsilon);
}

inline Adam adam_of(const AdamArgs& args) {
    return {.beta1 = args.beta1,
            .rest1 = static_cast<float>(1.0 - double{args.beta1}),
            .beta2 = args.beta2,
            .rest2 = static_cast<float>(1.0 - double{args.beta2}),
            .scalars = args.scalars,
            .epsilon = args.epsilon,
            .decay = args.weight_decay,
            .finite = args.finite};
}

}  // namespace gyre::SIMT_NAMESPACE
