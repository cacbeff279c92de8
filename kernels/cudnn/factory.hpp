// The CUDA libraries as operations: cuDNN (convolutions, max-pooling, batch normalisation) and
// cuBLASLt (linear layers).
#pragma once

#include <cstdint>
#include <memory>

#include "kernels/cuda/ops.hpp"

namespace gyre::cuda {

// cuDNN and cuBLASLt, found at run time; each operation in the .cpp file of its name. Throws Error
// (usage) naming the library that is missing.
std::unique_ptr<KernelFactory> make_library_factory(const Context& context,
                                                    const GpuOptions& options);

// cuDNN's log-softmax and its gradient, the peer of cross_entropy() in the benchmark. Throws Error
// (usage) where cuDNN is missing.
class LogSoftmax {
 public:
    explicit LogSoftmax(const Context& context);
    ~LogSoftmax();
    LogSoftmax(const LogSoftmax&) = delete;
    LogSoftmax& operator=(const LogSoftmax&) = delete;

    // All [n][classes], of one number of classes.
    void forward_backward(int n, int classes, const float* logits, float* log_probabilities,
                          const float* d_log_probabilities, float* d_logits);

 private:
    struct State;
    std::unique_ptr<State> state_;
};

}  // namespace gyre::cuda
