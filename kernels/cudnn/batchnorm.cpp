// Batch normalisation by cuDNN if the statistics are of this rank's images only. gyre's own kernels
// run if they are summed over ranks, which cuDNN cannot do in the middle of a pass, or if a channel
// has fewer than two values, which have no unbiased variance.
//
// CUDNN_BATCHNORM_SPATIAL: CUDNN_BATCHNORM_SPATIAL_PERSISTENT may be faster but limits the range of
// values (cudnn_ops.h). The headers do not say that the running variance is the unbiased one, but
// PyTorch relies on it.
//
// Not yet run on a GPU. tests/kernels/norm_pool_test.cpp checks it if there is one.
#include "base/round_up.hpp"
#include "kernels/cudnn/handles.hpp"

#if defined(GYRE_WITH_LIBRARIES)
namespace gyre::cuda {
namespace {

constexpr cudnnBatchNormMode_t kMode = CUDNN_BATCHNORM_SPATIAL;
constexpr int kAlignedElems = 16;  // vectors are aligned to 64 bytes, as parameters are

class BatchNorm2dOp final : public Op {
 public:
    BatchNorm2dOp(Handles& handles, const BatchNorm2dSpec& spec, const OpSizes& sizes)
        : handles_(handles),
          spec_(spec),
          vector_elems_(round_up(spec.in.channels, kAlignedElems)),
          channels_(handles.cudnn, 1, {spec.in.channels, 1, 1}),
          ours_(cuda::make_op(handles.context, spec, sizes)) {
        for_each_size(sizes, [&](int n, bool) { plan(n); });
        handles.context.workspace.reserve(vectors_bytes());
    }
    // Saved: mean and 1 / deviation, or what gyre's own kernel saves, which is no larger.
    OpNeeds needs() const override {
        return {.saved_bytes = vectors_bytes(), .phases = spec_.phases()};
    }

    void forward(const Batch& batch, const OpIo& io) override {
        if (!by_cudnn(batch)) {
            return ours_->forward(batch, io);
        }
        const auto handle = handles_.dnn.get();
        const auto tensor = plan(batch.n).tensor.get();
        const double epsilon{spec_.epsilon};
        const auto [weight, bias] = io.params;
        const auto [mean, variance] = io.state;
        if (!batch.training) {
            GYRE_CALL(handles_.cudnn, cudnnBatchNormalizationForwardInference(
                                          handle, kMode, &kOne, &kZero, tensor, io.x.f32(), tensor,
                                          io.y.f32(), channels_.get(), weight.f32(), bias.f32(),
                                          mean.f32(), variance.f32(), epsilon));
            return;
        }
        float* const saved = static_cast<float*>(io.saved);
        GYRE_CALL(handles_.cudnn,
                  cudnnBatchNormalizationForwardTraining(
                      handle, kMode, &kOne, &kZero, tensor, io.x.f32(), tensor, io.y.f32(),
                      channels_.get(), weight.f32(), bias.f32(), double{spec_.momentum}, mean.f32(),
                      variance.f32(), epsilon, saved, saved + vector_elems_));
    }
    void forward_phase(const Batch& batch, const OpIo& io, int phase) override {
        ours_->forward_phase(batch, io, phase);  // leaves meet: statistics are over ranks
    }
    // Computes all gradients at once: those of weight and bias into the workspace, dx into its
    // destination. If dx is not needed, as in a first layer, it goes to the workspace, which grows
    // in the first such pass.
    void backward_begin(const Batch& batch, const OpIo& io) override {
        if (!by_cudnn(batch)) {
            return ours_->backward_begin(batch, io);
        }
        const std::int64_t unwanted = io.dx ? 0 : spec_.in.elems() * batch.n;
        float* const vectors = handles_.context.workspace.floats(2 * vector_elems_ + unwanted);
        float* const dx = io.dx ? io.dx.f32() : vectors + 2 * vector_elems_;
        const auto tensor = plan(batch.n).tensor.get();
        const auto* const saved = static_cast<const float*>(io.saved);
        GYRE_CALL(
            handles_.cudnn,
            cudnnBatchNormalizationBackward(
                handles_.dnn.get(), kMode, &kOne, &kZero, &kOne, &kZero, tensor, io.x.f32(), tensor,
                io.dy.f32(), tensor, dx, channels_.get(), io.params[0].f32(), vectors,
                vectors + vector_elems_, double{spec_.epsilon}, saved, saved + vector_elems_));
    }
    void backward_params(const Batch& batch, const OpIo& io) override {
        if (!by_cudnn(batch)) {
            return ours_->backward_params(batch, io);
        }
        const float* const vectors = handles_.context.workspace.floats(2 * vector_elems_);
        const std::size_t bytes = static_cast<std::size_t>(spec_.in.channels) * sizeof(float);
        handles_.context.stream.copy(io.grads[0].data, vectors, bytes);
        handles_.context.stream.copy(io.grads[1].data, vectors + vector_elems_, bytes);
    }
    void backward_input(const Batch& batch, const OpIo& io) override {
        if (!by_cudnn(batch)) {
            ours_->backward_input(batch, io);
        }
    }

 private:
    struct Plan {
        int n;
        TensorDescriptor tensor;
    };
    // The result is the same in the forward and the backward pass of a batch.
    bool by_cudnn(const Batch& batch) const {
        return (spec_.local || batch.ranks == nullptr) && batch.n * spec_.in.plane_elems() > 1;
    }
    const Plan& plan(int n) {
        return plans_.at(n, [&] { return Plan{n, {handles_.cudnn, n, spec_.in}}; });
    }
    std::size_t vectors_bytes() const {
        return 2 * static_cast<std::size_t>(vector_elems_) * sizeof(float);
    }

    Handles& handles_;
    const BatchNorm2dSpec spec_;
    const std::int64_t vector_elems_;
    const TensorDescriptor channels_;
    const std::unique_ptr<Op> ours_;
    Plans<Plan> plans_;
};

}  // namespace

std::unique_ptr<Op> make_op(Handles& handles, const std::string& /*layer*/,
                            const BatchNorm2dSpec& spec, const OpSizes& sizes) {
    return double{spec.epsilon} < CUDNN_BN_MIN_EPSILON
               ? nullptr
               : std::make_unique<BatchNorm2dOp>(handles, spec, sizes);
}

}  // namespace gyre::cuda
#endif
