// A net's whole training pass as one operation: gather, forward, loss and backward of a batch and,
// on request, the update. A backend creates one from the net's operations, or returns null if it
// does not support the net.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "kernels/ops/batch.hpp"
#include "kernels/ops/specs.hpp"
#include "kernels/ops/update_rules.hpp"

namespace gyre {

struct TrainingPassSpec {
    // One operation of the chain, whose output is the next one's input; may be fused.
    struct Layer {
        OpSpec spec;
        // Positions of weight and bias in the flat buffers; -1: none.
        std::int64_t weight_offset = -1, bias_offset = -1;
    };
    Shape input;
    int classes = 0;
    std::vector<Layer> layers;
    int images = 0;  // the most in one pass
};

struct PassIo {
    GatherArgs images;                      // without samples, which are the batch's unless
    const NextSamplesArgs* next = nullptr;  // not null: choose the samples and advance the step
    float scale = 1.0f;                     // of the loss: 1 / size of the global batch
    float* params = nullptr;                // flat
    float* grads = nullptr;  // flat, overwritten except for the padding between parameters
    float* sums = nullptr;   // [2], overwritten: scale * sum of losses, number of correct images
    const UpdateArgs* update = nullptr;  // of all parameters; null: none is made
};

class TrainingPass {
 public:
    virtual ~TrainingPass() = default;
    // The kernels that run, as text for reports.
    virtual std::string description() const = 0;
    // Allocates nothing. For n = 0, gradients and sums are zero.
    virtual void run(const Batch& batch, const PassIo& io) = 0;
};

}  // namespace gyre
