// Max-pooling by cuDNN, which finds the maxima again in the backward pass.
#include "kernels/cudnn/handles.hpp"

#if defined(GYRE_WITH_LIBRARIES)
namespace gyre::cuda {
namespace {

class MaxPool2dOp final : public Op {
 public:
    MaxPool2dOp(Handles& handles, const MaxPool2dShape& shape, const OpSizes& sizes)
        : handles_(handles),
          shape_(shape),
          pooling_(handles.cudnn.own(handles.cudnn.cudnnCreatePoolingDescriptor,
                                     handles.cudnn.cudnnDestroyPoolingDescriptor,
                                     "cudnnCreatePoolingDescriptor")) {
        GYRE_CALL(handles.cudnn,
                  cudnnSetPooling2dDescriptor(
                      pooling_.get(),
                      handles.deterministic ? CUDNN_POOLING_MAX_DETERMINISTIC : CUDNN_POOLING_MAX,
                      CUDNN_PROPAGATE_NAN, shape.kernel, shape.kernel, shape.padding, shape.padding,
                      shape.stride, shape.stride));
        for_each_size(sizes, [&](int n, bool) { plan(n); });
        handles.context.workspace.reserve(output_bytes(sizes.train_images));
    }
    OpNeeds needs() const override { return {}; }
    void forward(const Batch& batch, const OpIo& io) override {
        if (batch.n > 0) {
            pool(plan(batch.n), io.x.f32(), io.y.f32());
        }
    }
    // Recomputes y, which cuDNN needs too but a ReLU in place may have changed.
    void backward_input(const Batch& batch, const OpIo& io) override {
        if (batch.n == 0) {
            return;
        }
        auto* const y =
            static_cast<float*>(handles_.context.workspace.bytes(output_bytes(batch.n)));
        const Plan& made = plan(batch.n);
        pool(made, io.x.f32(), y);
        const auto in = made.in.get(), out = made.out.get();
        GYRE_CALL(handles_.cudnn,
                  cudnnPoolingBackward(handles_.dnn.get(), pooling_.get(), &kOne, out, y, out,
                                       io.dy.f32(), in, io.x.f32(), &kZero, in, io.dx.f32()));
    }

 private:
    struct Plan {
        int n;
        TensorDescriptor in, out;
    };
    const Plan& plan(int n) {
        return plans_.at(n, [&] {
            return Plan{n, {handles_.cudnn, n, shape_.in}, {handles_.cudnn, n, shape_.out()}};
        });
    }
    std::size_t output_bytes(int n) const {
        return static_cast<std::size_t>(shape_.out().elems() * n) * sizeof(float);
    }
    void pool(const Plan& made, const float* x, float* y) const {
        GYRE_CALL(handles_.cudnn, cudnnPoolingForward(handles_.dnn.get(), pooling_.get(), &kOne,
                                                      made.in.get(), x, &kZero, made.out.get(), y));
    }

    Handles& handles_;
    const MaxPool2dShape shape_;
    const CudnnOwned<cudnnPoolingDescriptor_t> pooling_;
    Plans<Plan> plans_;
};

}  // namespace

std::unique_ptr<Op> make_op(Handles& handles, const std::string& /*layer*/,
                            const MaxPool2dSpec& spec, const OpSizes& sizes) {
    if (spec.shape.overhangs()) {
        return nullptr;  // cuDNN rounds the number of windows down
    }
    return std::make_unique<MaxPool2dOp>(handles, spec.shape, sizes);
}

}  // namespace gyre::cuda
#endif
