// Linear layers: y = x w^T + b, dx = dy w, dw = dy^T x, db = the sum of dy over the images.
// x [n][in], y [n][out], w [out][in], b [out].
//
// All three are tiled matrix products (block and grid, bytes and FLOPs: tensor_gemm.cuh for TF32,
// else gemm.cuh). The bias is added as sums are stored; its gradient is one more column of dw's
// product, against a row of ones.
#include "kernels/cuda/gemm.cuh"
#include "kernels/cuda/ops.hpp"
#include "kernels/cuda/tensor_operands.cuh"

namespace gyre::SIMT_NAMESPACE {
namespace {

struct StoreWithBias {
    float* y;
    const float* b;
    int columns;
    __device__ __forceinline__ void operator()(int m, int n, float sum) const {
        y[std::int64_t{m} * columns + n] = sum + b[n];
    }
};

struct Store {
    float* y;
    int columns;
    __device__ __forceinline__ void operator()(int m, int n, float sum) const {
        y[std::int64_t{m} * columns + n] = sum;
    }
};

class LinearOp final : public Op {
 public:
    LinearOp(const Context& context, const LinearShape& shape) : context_(context), shape_(shape) {
        context.workspace.reserve(kGemmWorkspaceBytes);
    }
    OpNeeds needs() const override { return {}; }
    void forward(const Batch& batch, const OpIo& io) override {
        const int n = batch.n, in = shape_.in_features, out = shape_.out_features;
        if (n > 0) {
            gemm(context_, "linear_forward", n, out, in, DenseOperand<true>{io.x.f32(), n, in, 1},
                 DenseOperand<true>{io.params[0].f32(), out, in, 1},
                 StoreWithBias{io.y.f32(), io.params[1].f32(), out});
        }
    }
    void backward_params(const Batch& batch, const OpIo& io) override {
        const int n = batch.n, in = shape_.in_features, out = shape_.out_features;
        if (n == 0) {
            return zero_gradients(context_, shape_.weight_elems(), out, io);
        }
        gemm(context_, "linear_backward_weights", out, in + 1, n,
             DenseOperand<false>{io.dy.f32(), out, 1, out},
             DenseOperand<false>{io.x.f32(), in, 1, in, in},
             StoreGradients{io.grads[0].f32(), io.grads[1].f32(), in});
    }
    void backward_input(const Batch& batch, const OpIo& io) override {
        const int n = batch.n, in = shape_.in_features, out = shape_.out_features;
        if (n > 0) {
            gemm(context_, "linear_backward_data", n, in, out,
                 DenseOperand<true>{io.dy.f32(), n, out, 1},
                 DenseOperand<false>{io.params[0].f32(), in, 1, in}, Store{io.dx.f32(), in});
        }
    }

 private:
    const Context context_;
    const LinearShape shape_;
};

// The same on tensor cores: features are multiples of 4, so that rows begin at multiples of 16
// bytes. May be fused with a ReLU.
class TensorLinearOp final : public Op {
 public:
    TensorLinearOp(const Context& context, const LinearSpec& spec, const OpSizes& sizes)
        : context_(context), shape_(spec.shape), relu_(spec.relu) {
        const int in = shape_.in_features, out = shape_.out_features, n = sizes.most();
        // A gradient may be of the images of all ranks, more than the layer is made for.
        partial_elems_ = std::max({tensor_partial_elems(n, out, in, kDepth),
                                   tensor_partial_elems(n, in, out, kDepth),
                                   tensor_partial_elems(out, in + 1, kMostImages, kDepth)});
        context.workspace.reserve(static_cast<std::size_t>(partial_elems_) * sizeof(float));
    }
    static bool can(const Context& context, const LinearShape& shape, int n) {
        const int in = shape.in_features, out = shape.out_features;
        const std::int64_t most = std::max({in, out, n});
        return context.tf32 && in % 4 == 0 && out % 4 == 0 && in >= 32 && out > 32 &&
               most * std::max(in, out) < std::int64_t{1} << 31;
    }
    OpNeeds needs() const override { return {.backward_reads_y = relu_}; }
    void forward(const Batch& batch, const OpIo& io) override {
        const int n = batch.n, in = shape_.in_features, out = shape_.out_features;
        if (n > 0) {
            tensor_gemm<Tf32Math>(
                context_, "linear_forward", n, out, in, DenseAlongK<float, true>{io.x.f32(), n, in},
                DenseAlongK<float, true>{io.params[0].f32(), out, in},
                StoreMatrix{io.y.f32(), io.params[1].f32(), n, out, relu_}, partial());
        }
    }
    void backward_begin(const Batch& batch, const OpIo& io) override {
        if (relu_) {
            relu_backward(context_, std::int64_t{batch.n} * shape_.out_features, io.y.f32(),
                          io.dy.f32());
        }
    }
    void backward_params(const Batch& batch, const OpIo& io) override {
        const int n = batch.n, in = shape_.in_features, out = shape_.out_features;
        if (n == 0) {
            return zero_gradients(context_, shape_.weight_elems(), out, io);
        }
        tensor_gemm<Tf32Math>(context_, "linear_backward_weights", out, in + 1, n,
                              DenseAcrossK<float, true>{io.dy.f32(), out, out},
                              DenseAcrossK<float, true, true>{io.x.f32(), in, in},
                              StoreMatrixGradients{io.grads[0].f32(), io.grads[1].f32(), out, in},
                              partial());
    }
    void backward_input(const Batch& batch, const OpIo& io) override {
        const int n = batch.n, in = shape_.in_features, out = shape_.out_features;
        if (n > 0) {
            tensor_gemm<Tf32Math>(context_, "linear_backward_data", n, in, out,
                                  DenseAlongK<float, true>{io.dy.f32(), n, out},
                                  DenseAcrossK<float, true>{io.params[0].f32(), in, in},
                                  StoreMatrix{io.dx.f32(), nullptr, n, in, false}, partial());
        }
    }

 private:
    static constexpr int kDepth = kSliceBytes / 4;
    static constexpr int kMostImages = 1 << 20;
    float* partial() const { return context_.workspace.floats(partial_elems_); }

    const Context context_;
    const LinearShape shape_;
    const bool relu_;
    std::int64_t partial_elems_ = 0;
};

}  // namespace

std::unique_ptr<Op> make_op(const Context& context, const LinearSpec& spec, const OpSizes& sizes) {
    if (TensorLinearOp::can(context, spec.shape, sizes.most())) {
        return std::make_unique<TensorLinearOp>(context, spec, sizes);
    }
    return spec.fused() ? nullptr : std::make_unique<LinearOp>(context, spec.shape);
}

}  // namespace gyre::SIMT_NAMESPACE
