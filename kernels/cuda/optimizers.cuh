// The update of parameters by their gradients, for kernels that have these: one parameter p by g,
// and of each rule an Update (below). Formulas: optimizers.cu.
#pragma once

#include <cmath>

#include "kernels/cuda/elementwise.cuh"
#include "kernels/ops/backend.hpp"

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
    const std::int32_t* skip;
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
            .finite = args.finite,
            .skip = args.skip};
}

// An Update of flat arrays reports gradients that are not finite (FiniteCheck), and updates element
// i by update(i, g), or elements i .. i + 3, i being a multiple of 4, by load(i), which a kernel
// may call for several before anything is stored, compute(i, g, quad) and store(i, quad).
struct UpdateSgd {
    static constexpr const char* kName = "sgd";
    SgdArgs a;
    float* p;
    struct Quad {
        float4 p;
    };
    __device__ __forceinline__ Quad load(std::int64_t i) const { return {load4(p + i)}; }
    __device__ __forceinline__ void compute(std::int64_t i, const float4& g, Quad& q) const {
        const float rate = a.scalars->learning_rate;
        check_finite(a.finite, i, g);
        sgd(a, rate, q.p.x, g.x);
        sgd(a, rate, q.p.y, g.y);
        sgd(a, rate, q.p.z, g.z);
        sgd(a, rate, q.p.w, g.w);
    }
    __device__ __forceinline__ void store(std::int64_t i, const Quad& q) const {
        store4(p + i, q.p);
    }
    __device__ __forceinline__ void operator()(std::int64_t i, float g) const {
        check_finite(a.finite, i, g);
        sgd(a, a.scalars->learning_rate, p[i], g);
    }
};

struct UpdateSgdMomentum {
    static constexpr const char* kName = "sgd_momentum";
    SgdArgs a;
    float *p, *velocity;
    struct Quad {
        float4 p, v;
    };
    __device__ __forceinline__ Quad load(std::int64_t i) const {
        return {load4(p + i), load4(velocity + i)};
    }
    __device__ __forceinline__ void compute(std::int64_t i, const float4& g, Quad& q) const {
        const float rate = a.scalars->learning_rate;
        check_finite(a.finite, i, g);
        sgd(a, rate, q.p.x, g.x, q.v.x);
        sgd(a, rate, q.p.y, g.y, q.v.y);
        sgd(a, rate, q.p.z, g.z, q.v.z);
        sgd(a, rate, q.p.w, g.w, q.v.w);
    }
    __device__ __forceinline__ void store(std::int64_t i, const Quad& q) const {
        store4(p + i, q.p);
        store4(velocity + i, q.v);
    }
    __device__ __forceinline__ void operator()(std::int64_t i, float g) const {
        check_finite(a.finite, i, g);
        sgd(a, a.scalars->learning_rate, p[i], g, velocity[i]);
    }
};

struct UpdateAdam {
    static constexpr const char* kName = "adam";
    Adam a;
    float *p, *m, *v;
    struct Quad {
        float4 p, m, v;
    };
    __device__ __forceinline__ Quad load(std::int64_t i) const {
        return {load4(p + i), load4(m + i), load4(v + i)};
    }
    __device__ __forceinline__ void compute(std::int64_t i, const float4& g, Quad& q) const {
        const StepScalars s = *a.scalars;
        check_finite(a.finite, i, g);
        adam(a, s, q.p.x, g.x, q.m.x, q.v.x);
        adam(a, s, q.p.y, g.y, q.m.y, q.v.y);
        adam(a, s, q.p.z, g.z, q.m.z, q.v.z);
        adam(a, s, q.p.w, g.w, q.m.w, q.v.w);
    }
    __device__ __forceinline__ void store(std::int64_t i, const Quad& q) const {
        store4(p + i, q.p);
        store4(m + i, q.m);
        store4(v + i, q.v);
    }
    __device__ __forceinline__ void operator()(std::int64_t i, float g) const {
        check_finite(a.finite, i, g);
        adam(a, *a.scalars, p[i], g, m[i], v[i]);
    }
};

// Calls use(the rule's Update of p), p beginning at element `offset` of the flat buffers.
template <typename Use>
void with_update(const UpdateArgs& update, float* p, std::int64_t offset, Use use) {
    if (update.adam != nullptr) {
        UpdateAdam adam{adam_of(*update.adam), p, update.first + offset, update.second + offset};
        adam.a.finite.first_elem += offset;
        return use(adam);
    }
    SgdArgs sgd = *update.sgd;
    sgd.finite.first_elem += offset;
    if (update.first != nullptr) {
        use(UpdateSgdMomentum{sgd, p, update.first + offset});
    } else {
        use(UpdateSgd{sgd, p});
    }
}

}  // namespace gyre::SIMT_NAMESPACE
