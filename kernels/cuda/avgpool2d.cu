// Average pooling (formula: AvgPool2dSpec) over planes p of n * channels:
//   y[p][oh][ow] = scale * sum over kh, kw of x[p][oh*s + kh][ow*s + kw]
//   dx[p][h][w] = scale * sum of dy[p][oh][ow] over the windows that cover (h, w), by oh, ow.
//
// Memory-bound: 4 bytes per input and per output in each direction, and kernel^2 / stride^2
// additions per input. One thread per output; backward one thread per input; 256 threads per block.
#include "kernels/cuda/elementwise.cuh"
#include "kernels/cuda/ops.hpp"
#include "kernels/cuda/planes.cuh"

namespace gyre::SIMT_NAMESPACE {
namespace {

struct Extents {
    int in_height, in_width, out_height, out_width, kernel_height, kernel_width, stride;
    float scale;
};

__global__ void avgpool2d_forward_kernel(std::int64_t elems, Extents e, const float* x, float* y) {
    const std::int64_t index = thread_index();
    if (index >= elems) {
        return;
    }
    const Place at = place_of(index, e.out_height, e.out_width);
    const float* corner =
        x + (at.plane * e.in_height + at.row * e.stride) * e.in_width + at.col * e.stride;
    float sum = 0.0f;
    for (int row = 0; row < e.kernel_height; ++row) {
        for (int col = 0; col < e.kernel_width; ++col) {
            sum += corner[std::int64_t{row} * e.in_width + col];
        }
    }
    y[index] = sum * e.scale;
}

__global__ void avgpool2d_backward_kernel(std::int64_t elems, Extents e, const float* dy,
                                          float* dx) {
    const std::int64_t index = thread_index();
    if (index >= elems) {
        return;
    }
    const Place at = place_of(index, e.in_height, e.in_width);
    const float* plane = dy + at.plane * e.out_height * e.out_width;
    const int last_row = min(at.row / e.stride, e.out_height - 1);
    const int last_col = min(at.col / e.stride, e.out_width - 1);
    float sum = 0.0f;
    for (int row = first_window(at.row, e.kernel_height, e.stride); row <= last_row; ++row) {
        for (int col = first_window(at.col, e.kernel_width, e.stride); col <= last_col; ++col) {
            sum += plane[std::int64_t{row} * e.out_width + col];
        }
    }
    dx[index] = sum * e.scale;
}

class AvgPool2dOp final : public Op {
 public:
    AvgPool2dOp(const Context& context, const AvgPool2dSpec& spec)
        : context_(context), spec_(spec), extents_{spec.in.height,     spec.in.width,
                                                   spec.out().height,  spec.out().width,
                                                   spec.kernel_height, spec.kernel_width,
                                                   spec.stride,        spec.scale()} {}
    OpNeeds needs() const override { return {.backward_reads_x = false}; }
    void forward(const Batch& batch, const OpIo& io) override {
        start("avgpool2d_forward", avgpool2d_forward_kernel, spec_.out().elems() * batch.n,
              io.x.f32(), io.y.f32());
    }
    void backward_input(const Batch& batch, const OpIo& io) override {
        start("avgpool2d_backward", avgpool2d_backward_kernel, spec_.in.elems() * batch.n,
              io.dy.f32(), io.dx.f32());
    }

 private:
    void start(const char* name, void (*kernel)(std::int64_t, Extents, const float*, float*),
               std::int64_t elems, const float* from, float* to) const {
        if (elems > 0) {
            const std::int64_t blocks = (elems + kElementwiseBlock - 1) / kElementwiseBlock;
            launch(name, kernel, dim3(static_cast<unsigned>(blocks)), dim3(kElementwiseBlock),
                   context_.stream, elems, extents_, from, to);
        }
    }

    const Context context_;
    const AvgPool2dSpec spec_;
    const Extents extents_;
};

}  // namespace

std::unique_ptr<Op> make_op(const Context& context, const AvgPool2dSpec& spec, const OpSizes&) {
    return std::make_unique<AvgPool2dOp>(context, spec);
}

}  // namespace gyre::SIMT_NAMESPACE
