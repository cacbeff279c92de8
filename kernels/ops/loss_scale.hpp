// Dynamic scaling of the loss, so that gradients in float16 do not become zero:
// torch.amp.GradScaler, with its names, defaults and order. The loss's gradient is multiplied by
// the scale, and gradients, once they are summed over the ranks, by 1 / scale; where one is not
// finite the step's update is skipped. All of it is decided on the device, the same on every rank.
#pragma once

#include <cmath>
#include <cstdint>

#include "kernels/base/data_type.hpp"
#include "kernels/ops/step.hpp"

namespace gyre {

struct LossScaling {
    float init_scale = 65536.0f;
    float growth_factor = 2.0f;   // after growth_interval updates in a row
    float backoff_factor = 0.5f;  // where one is skipped
    std::int32_t growth_interval = 2000;
    // Gradients that are not finite below it are no matter of range.
    static constexpr float kLeastScale = 0x1p-14f;
};

// On the device.
struct LossScale {
    float scale = 1.0f;               // of the next step
    std::int32_t growth_tracker = 0;  // updates since it was changed
    std::int32_t found_inf = 0;       // FiniteCheck's word of the step
    std::int32_t skip = 0;            // not 0: the step's update is skipped
    std::int32_t skipped = 0;         // updates so far,
    std::int32_t updates = 0;         // and those that were not
    StepScalars scalars = {};         // that the step's update reads
};

struct LossScaleArgs {
    LossScaling rule;
    LossScale* state = nullptr;            // on the device
    const StepScalars* scalars = nullptr;  // on the device: as if no update had been skipped
    float beta1 = 0.0f, beta2 = 0.0f;      // Adam's; 0: another rule
    // On the device: what becomes of found_inf where the scale has fallen below kLeastScale; the
    // scale that is next; 1 or 0 for a skipped update.
    std::int32_t* not_finite = nullptr;
    float* next_scale = nullptr;
    float* skips = nullptr;
};

// When all gradients of a step have been looked at: whether its update is skipped, by which numbers
// it updates, and the next scale.
GYRE_HOST_DEVICE inline void decide_step(const LossScaleArgs& a) {
    LossScale s = *a.state;
    s.skip = s.found_inf;
    s.found_inf = 0;
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
        // Adam counts its updates alone.
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
