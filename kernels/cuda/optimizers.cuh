// The update of parameters by their gradients, for kernels that have these. Formulas:
// kernels/ops/update_rules.hpp.
#pragma once

#include "kernels/cuda/elementwise.cuh"
#include "kernels/ops/update_rules.hpp"

namespace gyre::SIMT_NAMESPACE {

// Updates flat arrays and reports gradients that are not finite (FiniteCheck): element i by
// update(i, g), or elements i .. i + 3, i being a multiple of 4, by load(i), which a kernel may
// call for several before anything is stored, compute(i, g, quad) and store(i, quad).
template <typename Rule>
struct UpdateBy {
    static constexpr const char* kName = Rule::kName;
    static constexpr int kStates = Rule::kStates;
    UpdateArgs a;
    float* p;
    struct Quad {
        float4 p;
        float4 state[kStates > 0 ? kStates : 1];
    };
    __device__ __forceinline__ Quad load(std::int64_t i) const {
        Quad quad;
        quad.p = load4(p + i);
        SIMT_UNROLL
        for (int k = 0; k < kStates; ++k) {
            quad.state[k] = load4(a.states[k] + i);
        }
        return quad;
    }
    __device__ __forceinline__ void compute(std::int64_t i, const float4& g, Quad& q) const {
        const StepScalars s = scalars_of(a);
        check_finite(a.finite, i, g);
        apply(s, q.p.x, g.x, [&](int k) -> float& { return q.state[k].x; });
        apply(s, q.p.y, g.y, [&](int k) -> float& { return q.state[k].y; });
        apply(s, q.p.z, g.z, [&](int k) -> float& { return q.state[k].z; });
        apply(s, q.p.w, g.w, [&](int k) -> float& { return q.state[k].w; });
    }
    __device__ __forceinline__ void store(std::int64_t i, const Quad& q) const {
        store4(p + i, q.p);
        SIMT_UNROLL
        for (int k = 0; k < kStates; ++k) {
            store4(a.states[k] + i, q.state[k]);
        }
    }
    __device__ __forceinline__ void operator()(std::int64_t i, float g) const {
        check_finite(a.finite, i, g);
        apply(scalars_of(a), p[i], g, [&](int k) -> float& { return a.states[k][i]; });
    }

 private:
    template <typename State>
    __device__ __forceinline__ void apply(const StepScalars& s, float& value, float g,
                                          State state) const {
        if constexpr (kStates == 0) {
            Rule::update(a, s, value, g);
        } else if constexpr (kStates == 1) {
            Rule::update(a, s, value, g, state(0));
        } else {
            Rule::update(a, s, value, g, state(0), state(1));
        }
    }
};

// Calls use(the rule's UpdateBy of p), p beginning at element `offset` of the flat buffers.
template <typename Use>
void with_update(UpdateArgs args, float* p, std::int64_t offset, Use use) {
    args.finite.first_elem += offset;
    with_formula(args.formula, [&]<typename Rule>(Rule) {
        for (int k = 0; k < Rule::kStates; ++k) {
            args.states[k] += offset;
        }
        use(UpdateBy<Rule>{args, p});
    });
}

}  // namespace gyre::SIMT_NAMESPACE
