// What travels with the gradients of a step, behind them in their buffer, and is summed over the
// ranks as they are.
#pragma once

#include <cstddef>
#include <cstdint>

namespace gyre::model {

struct StepTail {
    float loss = 0.0f;     // Net::loss() writes these two: scale * sum of losses,
    float correct = 0.0f;  // and the number of images that are classified correctly
    float stop = 0.0f;     // ranks that want to stop
    // FiniteCheck's word. 0 until the reduction is over, as an integer is no term of a sum of
    // floats; whoever has read another value sets it back.
    std::int32_t not_finite = 0;
    // Where the loss is scaled, written when the reduction is over: the scale of the next step, and
    // whether this one's update was skipped.
    float loss_scale = 0.0f;
    float skipped = 0.0f;
    float save = 0.0f;  // ranks that want a checkpoint; whoever has read another value sets it back
    float padding[9] = {};  // up to a multiple of 64 bytes
};
static_assert(sizeof(StepTail) == 64 && offsetof(StepTail, loss) == 0 &&
              offsetof(StepTail, correct) == sizeof(float));

}  // namespace gyre::model
