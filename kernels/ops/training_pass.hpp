// A net's whole training pass as one operation: gather, forward, loss and backward of a batch, and
// where asked the update. A backend makes one from the net's operations, or null where it has none
// for such a net.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "kernels/ops/batch.hpp"
#include "kernels/ops/specs.hpp"
#include "kernels/ops/step.hpp"

namespace gyre {

struct TrainingPassSpec {
    // One operation of the chain, each the next one's input; fused forms may be among them.
    struct Layer {
        OpSpec spec;
        // Of weight and bias in the flat buffers, where there are such.
        std::int64_t weight_offset = -1, bias_offset = -1;
    };
    Shape input;
    int classes = 0;
    std::vector<Layer> layers;
    int images = 0;  // the most in a pass
};

struct PassIo {
    GatherArgs images;                      // but for the samples, which are the batch's,
    const NextSamplesArgs* next = nullptr;  // or, where not null, these; the step is moved on then
    float scale = 1.0f;                     // of the loss: 1 / size of the global batch
    float* params = nullptr;                // flat
    float* grads = nullptr;  // flat, overwritten but for the padding between parameters
    float* sums = nullptr;   // [2], overwritten: scale * sum of losses, number of correct images
    const PassUpdate* update = nullptr;  // of all parameters; null: they stay as they are
};

class TrainingPass {
 public:
    virtual ~TrainingPass() = default;
    // What runs, as text.
    virtual std::string description() const = 0;
    // Allocates nothing. n = 0: gradients and sums are zeros.
    virtual void run(const Batch& batch, const PassIo& io) = 0;
};

}  // namespace gyre
