// What comparisons with the CUDA libraries need beside make_library_kernels() (layer_kernels.hpp).
#pragma once

#include <cstdint>
#include <memory>

#include "kernels/cuda/kernels.hpp"

namespace gyre::cuda {

// cuDNN's log-softmax and its gradient, the peer of cross_entropy() in the benchmark. Throws Error
// (usage) where cuDNN is missing.
class LogSoftmax {
 public:
    explicit LogSoftmax(const Context& context);
    ~LogSoftmax();
    LogSoftmax(const LogSoftmax&) = delete;
    LogSoftmax& operator=(const LogSoftmax&) = delete;

    // All [n][classes].
    void forward_backward(int n, int classes, const float* logits, float* log_probabilities,
                          const float* d_log_probabilities, float* d_logits);

 private:
    struct State;
    std::unique_ptr<State> state_;
};

}  // namespace gyre::cuda
