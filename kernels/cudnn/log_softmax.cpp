#include "kernels/cudnn/handles.hpp"

#if defined(GYRE_WITH_LIBRARIES)
namespace gyre::cuda {
namespace {

struct Logits {
    int n;
    TensorDescriptor tensor;
};

}  // namespace

struct LogSoftmax::State {
    Handles handles;
    Plans<Logits> logits{};
};

LogSoftmax::LogSoftmax(const Context& context) : state_(new State{{context, false}}) {}
LogSoftmax::~LogSoftmax() = default;

void LogSoftmax::forward_backward(int n, int classes, const float* logits, float* log_probabilities,
                                  const float* d_log_probabilities, float* d_logits) {
    const Cudnn& cudnn = state_->handles.cudnn;
    const auto handle = state_->handles.dnn.get();
    const Logits& made = state_->logits.at(n, [&] {
        return Logits{n, {cudnn, n, {classes, 1, 1}}};
    });
    const auto tensor = made.tensor.get();
    GYRE_CALL(cudnn, cudnnSoftmaxForward(handle, CUDNN_SOFTMAX_LOG, CUDNN_SOFTMAX_MODE_INSTANCE,
                                         &kOne, tensor, logits, &kZero, tensor, log_probabilities));
    GYRE_CALL(cudnn, cudnnSoftmaxBackward(handle, CUDNN_SOFTMAX_LOG, CUDNN_SOFTMAX_MODE_INSTANCE,
                                          &kOne, tensor, log_probabilities, tensor,
                                          d_log_probabilities, &kZero, tensor, d_logits));
}

}  // namespace gyre::cuda
#endif
