// Linear layers: y = x w^T + b, dx = dy w, dw = dy^T x, db = the sum of dy over the images.
// x [n][in], y [n][out], w [out][in], b [out].
//
// All three are tiled matrix products (gemm.cuh: block and grid, bytes and FLOPs). The bias is
// added as sums are stored; its gradient is one more column of dw's product, against a row of ones.
#include "kernels/cuda/gemm.cuh"

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

}  // namespace

std::int64_t linear_workspace_elems(const Context& context, const LinearShape&, int) {
    return gemm_workspace_elems(context);
}

void linear_forward(const Context& context, const LinearShape& shape, int n, const float* x,
                    const float* w, const float* b, float* y) {
    const int in = shape.in_features, out = shape.out_features;
    gemm(context, "linear_forward", n, out, in, DenseOperand<true>{x, n, in, 1},
         DenseOperand<true>{w, out, in, 1}, StoreWithBias{y, b, out});
}

void linear_backward_data(const Context& context, const LinearShape& shape, int n, const float* dy,
                          const float* w, float* dx) {
    const int in = shape.in_features, out = shape.out_features;
    gemm(context, "linear_backward_data", n, in, out, DenseOperand<true>{dy, n, out, 1},
         DenseOperand<false>{w, in, 1, in}, Store{dx, in});
}

void linear_backward_weights(const Context& context, const LinearShape& shape, int n,
                             const float* x, const float* dy, float* dw, float* db) {
    const int in = shape.in_features, out = shape.out_features;
    gemm(context, "linear_backward_weights", out, in + 1, n, DenseOperand<false>{dy, out, 1, out},
         DenseOperand<false>{x, in, 1, in, in}, StoreGradients{dw, db, in});
}

}  // namespace gyre::SIMT_NAMESPACE
