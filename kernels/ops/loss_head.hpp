// The end of a training pass as one operation: a net's last linear layer, the loss, and the
// gradients of both.
#pragma once

#include "kernels/ops/op.hpp"
#include "kernels/ops/step.hpp"

namespace gyre {

class LossHead {
 public:
    virtual ~LossHead() = default;
    // Reads x, params and loss.labels; overwrites grads, dx where it is not null (as the layer's
    // spec says), dy [n][classes] with the gradient of the logits, and loss.sums. y is not written.
    // n = 0: gradients and sums are zeros. loss_scale, on the device: a further factor of dy, and
    // so of all gradients; null: 1.
    virtual void run(const Batch& batch, const OpIo& io, const CrossEntropyArgs& loss,
                     const float* loss_scale = nullptr) = 0;
};

}  // namespace gyre
