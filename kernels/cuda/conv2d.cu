// Convolution: in TF32 on tensor cores if possible, else for each direction by the direct kernels
// if they support it, else by implicit GEMM (conv2d.cuh). Formulas, shapes, blocks and grids are in
// the files of these kernels.
#include <algorithm>

#include "base/error.hpp"
#include "kernels/cuda/conv2d.cuh"
#include "kernels/cuda/gemm.cuh"
#include "kernels/cuda/ops.hpp"

namespace gyre::SIMT_NAMESPACE {
namespace {

class Conv2dOp final : public Op {
 public:
    Conv2dOp(const Context& context, const Conv2dShape& shape, const OpSizes& sizes)
        : context_(context),
          shape_(shape),
          forward_(direct::can_forward(shape) ? direct::forward : implicit_gemm::forward),
          backward_data_(direct::can_backward_data(shape) ? direct::backward_data
                                                          : implicit_gemm::backward_data),
          backward_weights_(direct::can_backward_weights(shape) ? direct::backward_weights
                                                                : implicit_gemm::backward_weights) {
        require_countable(sizes.most());
        context.workspace.reserve(
            std::max(kGemmWorkspaceBytes, direct::workspace_bytes(shape, sizes.train_images)));
    }
    OpNeeds needs() const override { return {}; }
    void forward(const Batch& batch, const OpIo& io) override {
        if (batch.n > 0) {
            forward_(context_, shape_, batch.n, io.x.f32(), io.params[0].f32(), io.params[1].f32(),
                     io.y.f32());
        }
    }
    void backward_params(const Batch& batch, const OpIo& io) override {
        if (batch.n == 0) {
            return zero_gradients(context_, shape_.weight_elems(), shape_.out_channels, io);
        }
        backward_weights_(context_, shape_, batch.n, io.x.f32(), io.dy.f32(), io.grads[0].f32(),
                          io.grads[1].f32());
    }
    void backward_input(const Batch& batch, const OpIo& io) override {
        if (batch.n > 0) {
            backward_data_(context_, shape_, batch.n, io.dy.f32(), io.params[0].f32(), io.dx.f32());
        }
    }

 private:
    // Kernels index positions over all images in 32 bits.
    void require_countable(int n) const {
        const std::int64_t positions =
            std::max(shape_.in.plane_elems(), shape_.out().plane_elems()) * std::int64_t{n};
        if (positions > 0x7fffffff - 128) {
            throw usage_error(
                "a convolution has more than 2^31 pixels in a batch; use a smaller "
                "`batch-size` and `test-batch-size`");
        }
    }

    const Context context_;
    const Conv2dShape shape_;
    decltype(&direct::forward) const forward_;
    decltype(&direct::backward_data) const backward_data_;
    decltype(&direct::backward_weights) const backward_weights_;
};

}  // namespace

std::unique_ptr<Op> make_op(const Context& context, const Conv2dSpec& spec, const OpSizes& sizes,
                            DataType type) {
    for (const auto make : {make_first_conv, make_tensor_conv}) {
        if (auto op = make(context, spec, sizes, type)) {
            return op;
        }
    }
    return nullptr;
}

std::unique_ptr<Op> make_op(const Context& context, const Conv2dSpec& spec, const OpSizes& sizes) {
    if (auto op = make_op(context, spec, sizes, DataType::float32)) {
        return op;
    }
    return spec.fused() ? nullptr : std::make_unique<Conv2dOp>(context, spec.shape, sizes);
}

}  // namespace gyre::SIMT_NAMESPACE
