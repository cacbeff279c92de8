// One operation for the end of a net's forward pass and the beginning of its backward pass: the
// last linear layer, the loss and the gradients of both.
#pragma once

#include "kernels/ops/op.hpp"
#include "kernels/ops/step.hpp"

namespace gyre {

class LossHead {
 public:
    virtual ~LossHead() = default;
    // Reads x, params and loss.labels. Overwrites grads, dx unless it is null (as the layer's spec
    // says), dy [n][classes] with the gradient of the logits, and loss.sums; y is not written. For
    // n = 0, gradients and sums are zero. loss_scale (on the device) also multiplies dy and thus
    // all gradients; null: 1.
    virtual void run(const Batch& batch, const OpIo& io, const CrossEntropyArgs& loss,
                     const float* loss_scale = nullptr) = 0;
};

}  // namespace gyre
