// Statistics of a step. They follow the gradients in their buffer and are summed over the ranks
// with them.
#pragma once

#include <cstddef>
#include <cstdint>

namespace gyre::model {

struct StepStats {
    float loss = 0.0f;     // Net::loss() writes these two: scale * sum of losses,
    float correct = 0.0f;  // and the number of images that are classified correctly
    float stop = 0.0f;     // ranks that want to stop
    // FiniteCheck's word. 0 until the reduction is over, as an integer is not a term of a sum of
    // floats; whoever has read another value sets it back.
    std::int32_t not_finite = 0;
    // Written after the reduction if the loss is scaled: the scale of the next step, and whether
    // this step's update was skipped.
    float loss_scale = 0.0f;
    float skipped = 0.0f;
    float save = 0.0f;  // ranks that want a checkpoint; whoever has read another value sets it back
    float gradient_norm = 0.0f;  // before it is clipped, written after the reduction if it is
    float padding[8] = {};       // up to a multiple of 64 bytes
};
static_assert(sizeof(StepStats) == 64 && offsetof(StepStats, loss) == 0 &&
              offsetof(StepStats, correct) == sizeof(float));

}  // namespace gyre::model
