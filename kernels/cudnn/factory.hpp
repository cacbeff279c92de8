// Operations by NVIDIA's libraries: cuDNN (convolutions, max-pooling, batch normalisation) and
// cuBLASLt (linear layers).
#pragma once

#include <cstdint>
#include <memory>

#include "kernels/cuda/ops.hpp"

namespace gyre::cuda {

// Loads cuDNN and cuBLASLt at run time; each operation is in the .cpp file of its name. Throws
// Error (usage) naming the missing library. deterministic: only algorithms that are.
std::unique_ptr<KernelFactory> make_library_factory(const Context& context, bool deterministic);

// cuDNN's log-softmax and its gradient, the counterpart of cross_entropy() in the benchmark. Throws
// Error (usage) if cuDNN is missing.
class LogSoftmax {
 public:
    explicit LogSoftmax(const Context& context);
    ~LogSoftmax();
    LogSoftmax(const LogSoftmax&) = delete;
    LogSoftmax& operator=(const LogSoftmax&) = delete;

    // All arrays are [n][classes]; `classes` must be the same in all calls.
    void forward_backward(int n, int classes, const float* logits, float* log_probabilities,
                          const float* d_log_probabilities, float* d_logits);

 private:
    struct State;
    std::unique_ptr<State> state_;
};

}  // namespace gyre::cuda
