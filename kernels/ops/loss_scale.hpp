// Dynamic loss scaling, which keeps float16 gradients from underflowing: torch.amp.GradScaler with
// its names, defaults and order. The loss's gradient is multiplied by the scale, and gradients
// summed over the ranks by 1 / scale; if any of them is not finite, the step's update is skipped.
// All decisions are made on the device and are the same on every rank.
#pragma once

#include <cmath>
#include <cstdint>

#include "base/data_type.hpp"
#include "kernels/ops/step.hpp"

namespace gyre {

struct LossScaling {
    float init_scale = 65536.0f;
    float growth_factor = 2.0f;   // after growth_interval consecutive updates
    float backoff_factor = 0.5f;  // after a skipped update
    std::int32_t growth_interval = 2000;
    // Below this scale, non-finite gradients cannot be due to float16's range.
    static constexpr float kLeastScale = 0x1p-14f;
};

// State on the device.
struct LossScale {
    float scale = 1.0f;               // of the next step
    std::int32_t growth_tracker = 0;  // updates since the scale last changed
    std::int32_t skip = 0;            // non-zero: the current step's update is skipped
    std::int32_t skipped = 0;         // updates skipped so far
    std::int32_t updates = 0;         // updates made so far
    StepScalars scalars = {};         // read by the current step's update
};

struct LossScaleArgs {
    LossScaling rule;
    LossScale* state = nullptr;         // on the device
    GradientFacts* of_ranks = nullptr;  // [ranks], on the device
    int ranks = 1;
    const StepScalars* scalars = nullptr;  // on the device; as if no update had been skipped
    float beta1 = 0.0f, beta2 = 0.0f;      // Adam's; 0 for other rules
    // Outputs on the device: FiniteCheck's word, written if the scale has fallen below kLeastScale;
    // the next step's scale; and 1 if the update is skipped, else 0.
    std::int32_t* not_finite = nullptr;
    float* next_scale = nullptr;
    float* skips = nullptr;
};

// Called once all gradients of a step have been checked: decides whether its update is skipped, and
// sets the update's scalars and the next scale.
GYRE_HOST_DEVICE inline void decide_step(const LossScaleArgs& a) {
    LossScale s = *a.state;
    s.skip = 0;
    for (int rank = 0; rank < a.ranks; ++rank) {
        std::int32_t& found = a.of_ranks[rank].not_finite;
        s.skip = found > s.skip ? found : s.skip;
        found = 0;
    }
    if (s.skip != 0) {
        ++s.skipped;
        s.scale *= a.rule.backoff_factor;
        s.growth_tracker = 0;
        if (s.scale < LossScaling::kLeastScale) {
            *a.not_finite = s.skip;
        }
    } else {
        ++s.updates;
        if (++s.growth_tracker == a.rule.growth_interval) {
            const float grown = s.scale * a.rule.growth_factor;
            s.scale = grown <= 3.402823466e38f ? grown : s.scale;
            s.growth_tracker = 0;
        }
    }
    s.scalars = *a.scalars;
    if (s.skipped > 0 && a.beta1 > 0.0f) {
        // Adam's bias correction counts only updates that were made.
        const double first = 1.0 - pow(double{a.beta1}, double(s.updates));
        const double second = 1.0 - pow(double{a.beta2}, double(s.updates));
        s.scalars.adam_step_size = static_cast<float>(double{s.scalars.learning_rate} / first);
        s.scalars.adam_correction = static_cast<float>(1.0 / sqrt(second));
    }
    *a.next_scale = s.scale;
    *a.skips = s.skip != 0 ? 1.0f : 0.0f;
    *a.state = s;
}

}  // namespace gyre
