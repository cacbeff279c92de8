// Update rules: the formula of each for one element, which the kernels of CPUs and GPUs share, and
// what it reads. To add a rule, add its formula here and its row to kUpdateRules
// (train/optimizer_spec.hpp).
#pragma once

#include <cmath>
#include <cstdint>

#include "base/data_type.hpp"
#include "kernels/ops/step.hpp"

namespace gyre {

enum class Formula { sgd, sgd_momentum, adam, lion, rmsprop };

// An update of parameters p by gradients g, both [elems] of the flat buffers.
struct UpdateArgs {
    Formula formula = Formula::sgd;
    const StepScalars* scalars = nullptr;  // on the device
    float momentum = 0.0f;                 // sgd_momentum
    bool nesterov = false;                 // sgd_momentum
    float beta1 = 0.9f;                    // adam, lion
    float beta2 = 0.999f;                  // adam, lion; rmsprop's alpha
    float epsilon = 1e-8f;                 // adam, rmsprop
    float weight_decay = 0.0f;             // added to the gradient; else it is in the scalars
    float lr_scale = 1.0f;                 // of these parameters' learning rate
    float shrink_scale = 1.0f;             // of what the scalars' shrink takes from them
    float* states[2] = {};                 // on the device, as p; as many as the formula has
    FiniteCheck finite = {};
    const std::int32_t* skip = nullptr;  // on the device: not 0: nothing is updated; null: 0
    UpdateGap gap = {};
};

// A product that is rounded by itself on a GPU, whose compiler would fuse it with a sum in one
// kernel and not in another: the kernels that update with a formula must agree to the last bit.
GYRE_HOST_DEVICE inline float product(float a, float b) {
#if defined(__CUDA_ARCH__)
    return __fmul_rn(a, b);
#else
    return a * b;
#endif
}

// The scalars of the step for these parameters, exactly themselves if both scales are 1 and
// shrink is 1/2 or more. Without a branch, on which a compiler would make two loops.
GYRE_HOST_DEVICE inline StepScalars scalars_of(const UpdateArgs& a) {
    StepScalars s = *a.scalars;
    s.learning_rate *= a.lr_scale;
    s.adam_step_size *= a.lr_scale;
    s.shrink = 1.0f - product(a.shrink_scale, 1.0f - s.shrink);
    return s;
}

// Each formula updates one parameter p and its states, which begin as zeros, from its gradient g.

// torch.optim.SGD without momentum.
struct Sgd {
    static constexpr const char* kName = "sgd";
    static constexpr int kStates = 0;
    GYRE_HOST_DEVICE static void update(const UpdateArgs& a, const StepScalars& s, float& p,
                                        float g) {
        p -= product(s.learning_rate, g + product(a.weight_decay, p));
    }
};

// torch.optim.SGD
struct SgdMomentum {
    static constexpr const char* kName = "sgd_momentum";
    static constexpr int kStates = 1;
    GYRE_HOST_DEVICE static void update(const UpdateArgs& a, const StepScalars& s, float& p,
                                        float g, float& velocity) {
        const float d = g + product(a.weight_decay, p);
        velocity = product(a.momentum, velocity) + d;
        p -= product(s.learning_rate, a.nesterov ? d + product(a.momentum, velocity) : velocity);
    }
};

// torch.optim.Adam and, with a decay in the scalars, torch.optim.AdamW
struct Adam {
    static constexpr const char* kName = "adam";
    static constexpr int kStates = 2;
    GYRE_HOST_DEVICE static void update(const UpdateArgs& a, const StepScalars& s, float& p,
                                        float g, float& m, float& v) {
        const float d = g + product(a.weight_decay, p);
        m = product(a.beta1, m) + product(1.0f - a.beta1, d);
        v = product(a.beta2, v) + product((1.0f - a.beta2) * d, d);
        p = product(p, s.shrink) -
            s.adam_step_size * m / (product(sqrtf(v), s.adam_correction) + a.epsilon);
    }
};

// Chen et al., Symbolic Discovery of Optimization Algorithms, 2023, algorithm 2
struct Lion {
    static constexpr const char* kName = "lion";
    static constexpr int kStates = 1;
    GYRE_HOST_DEVICE static void update(const UpdateArgs& a, const StepScalars& s, float& p,
                                        float g, float& m) {
        const float c = product(a.beta1, m) + product(1.0f - a.beta1, g);
        p = product(p, s.shrink) - product(s.learning_rate, c > 0.0f   ? 1.0f
                                                            : c < 0.0f ? -1.0f
                                                                       : 0.0f);
        m = product(a.beta2, m) + product(1.0f - a.beta2, g);
    }
};

// torch.optim.RMSprop without momentum, not centered.
struct RmsProp {
    static constexpr const char* kName = "rmsprop";
    static constexpr int kStates = 1;
    GYRE_HOST_DEVICE static void update(const UpdateArgs& a, const StepScalars& s, float& p,
                                        float g, float& v) {
        const float d = g + product(a.weight_decay, p);
        v = product(a.beta2, v) + product((1.0f - a.beta2) * d, d);
        p -= s.learning_rate * d / (sqrtf(v) + a.epsilon);
    }
};

// Calls use(the formula).
template <typename Use>
void with_formula(Formula formula, Use use) {
    switch (formula) {
        case Formula::sgd:
            return use(Sgd{});
        case Formula::sgd_momentum:
            return use(SgdMomentum{});
        case Formula::adam:
            return use(Adam{});
        case Formula::lion:
            return use(Lion{});
        case Formula::rmsprop:
            return use(RmsProp{});
    }
}

}  // namespace gyre
