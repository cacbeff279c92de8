// Linear layers: y = x w^T + b, dx = dy w, dw = dy^T x, db = the sum of dy over the images.
// x [n][in], y [n][out], w [out][in], b [out].
//
// All three are tiled matrix products (gemm.cuh: block and grid, bytes and FLOPs). The bias is
// added as sums are stored; its gradient is one more column of dw's product, against a row of ones.
#include "kernels/cuda/gemm.cuh"
#include "kernels/cuda/ops.hpp"

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
        context.workspace.reserve(gemm_workspace_bytes(context));
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

}  // namespace

std::unique_ptr<Op> make_op(const Context& context, const LinearSpec& spec, const OpSizes&) {
    return spec.fused() ? nullptr : std::make_unique<LinearOp>(context, spec.shape);
}

}  // namespace gyre::SIMT_NAMESPACE
