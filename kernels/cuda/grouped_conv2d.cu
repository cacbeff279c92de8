// Grouped 2-D convolution (formula: GroupedConv2dSpec), for groups of few channels, such as the one
// of a depthwise convolution. With s = stride, p = padding and c over the group's input channels:
//   y[i][o][oh][ow] = b[o] + sum over c, kh, kw of w[o][c][kh][kw] x[i][c][oh*s - p + kh][...]
//   dx[i][c][h][w] = sum over the group's o, and the windows oh, ow that cover (h, w), of
//       w[o][c][h + p - oh*s][w + p - ow*s] dy[i][o][oh][ow]
//   dw[o][c][kh][kw] = sum over i, oh, ow of dy[i][o][oh][ow] x[i][c][oh*s - p + kh][...]
//   db[o] = sum over i, oh, ow of dy[i][o][oh][ow]
//
// Depthwise it is memory-bound: 4 bytes per input and per output in each direction. One thread per
// output, backward one per input; for the gradients of parameters one block per weight and per
// bias, which reads all images. 256 threads per block.
#include "base/error.hpp"
#include "kernels/cuda/elementwise.cuh"
#include "kernels/cuda/ops.hpp"
#include "kernels/cuda/planes.cuh"

namespace gyre::SIMT_NAMESPACE {
namespace {

struct Grouped {
    int in_channels, in_height, in_width, out_channels, out_height, out_width;
    int kernel, stride, padding, inputs, outputs;  // channels of a group
};

__global__ void grouped_forward_kernel(std::int64_t elems, Grouped e, const float* x,
                                       const float* w, const float* b, float* y) {
    const std::int64_t index = thread_index();
    if (index >= elems) {
        return;
    }
    const Place at = place_of(index, e.out_height, e.out_width);
    const std::int64_t image = at.plane / e.out_channels;
    const int o = static_cast<int>(at.plane % e.out_channels);
    const float* plane = x + (image * e.in_channels + o / e.outputs * e.inputs) * e.in_height *
                                 static_cast<std::int64_t>(e.in_width);
    const float* weight = w + std::int64_t{o} * e.inputs * e.kernel * e.kernel;
    const int top = at.row * e.stride - e.padding, left = at.col * e.stride - e.padding;
    float sum = b[o];
    for (int c = 0; c < e.inputs; ++c) {
        for (int kh = 0; kh < e.kernel; ++kh) {
            const int row = top + kh;
            for (int kw = 0; kw < e.kernel; ++kw) {
                const int col = left + kw;
                if (row >= 0 && row < e.in_height && col >= 0 && col < e.in_width) {
                    sum += weight[kh * e.kernel + kw] * plane[std::int64_t{row} * e.in_width + col];
                }
            }
        }
        weight += e.kernel * e.kernel;
        plane += std::int64_t{e.in_height} * e.in_width;
    }
    y[index] = sum;
}

__global__ void grouped_backward_input_kernel(std::int64_t elems, Grouped e, const float* dy,
                                              const float* w, float* dx) {
    const std::int64_t index = thread_index();
    if (index >= elems) {
        return;
    }
    const Place at = place_of(index, e.in_height, e.in_width);
    const std::int64_t image = at.plane / e.in_channels;
    const int c = static_cast<int>(at.plane % e.in_channels);
    const int first = c / e.inputs * e.outputs;  // the group's first output channel
    const float* plane = dy + (image * e.out_channels + first) * e.out_height *
                                  static_cast<std::int64_t>(e.out_width);
    const float* weight = w + (std::int64_t{first} * e.inputs + c % e.inputs) * e.kernel * e.kernel;
    const int row = at.row + e.padding, col = at.col + e.padding;
    const int first_row = first_window(row, e.kernel, e.stride);
    const int first_col = first_window(col, e.kernel, e.stride);
    const int last_row = min(row / e.stride, e.out_height - 1);
    const int last_col = min(col / e.stride, e.out_width - 1);
    float sum = 0.0f;
    for (int o = 0; o < e.outputs; ++o) {
        for (int oh = first_row; oh <= last_row; ++oh) {
            for (int ow = first_col; ow <= last_col; ++ow) {
                sum += weight[(row - oh * e.stride) * e.kernel + col - ow * e.stride] *
                       plane[std::int64_t{oh} * e.out_width + ow];
            }
        }
        weight += std::int64_t{e.inputs} * e.kernel * e.kernel;
        plane += std::int64_t{e.out_height} * e.out_width;
    }
    dx[index] = sum;
}

// Block: a weight, or beyond the weights a bias. A warp takes every eighth row, a lane every 32nd
// column.
__global__ void grouped_backward_params_kernel(Grouped e, int n, const float* x, const float* dy,
                                               float* dw, float* db) {
    const int block = static_cast<int>(blockIdx.x), taps = e.kernel * e.kernel;
    const int of_output = e.inputs * taps, weights = e.out_channels * of_output;
    const bool bias = block >= weights;
    const int o = bias ? block - weights : block / of_output;
    const int c = o / e.outputs * e.inputs + block % of_output / taps;
    const int kh = block % taps / e.kernel - e.padding, kw = block % e.kernel - e.padding;
    const std::int64_t dy_plane = std::int64_t{e.out_height} * e.out_width;
    const std::int64_t x_plane = std::int64_t{e.in_height} * e.in_width;
    double sum = 0.0;
    for (int image = 0; image < n; ++image) {
        const float* const gradients = dy + (std::int64_t{image} * e.out_channels + o) * dy_plane;
        const float* const values =
            bias ? x : x + (std::int64_t{image} * e.in_channels + c) * x_plane;
        for (int oh = static_cast<int>(threadIdx.x / 32); oh < e.out_height;
             oh += static_cast<int>(kElementwiseBlock) / 32) {
            const int row = oh * e.stride + kh;
            if (!bias && (row < 0 || row >= e.in_height)) {
                continue;
            }
            for (int ow = static_cast<int>(threadIdx.x % 32); ow < e.out_width; ow += 32) {
                const float gradient = gradients[std::int64_t{oh} * e.out_width + ow];
                const int col = ow * e.stride + kw;
                if (bias) {
                    sum += static_cast<double>(gradient);
                } else if (col >= 0 && col < e.in_width) {
                    sum += static_cast<double>(gradient *
                                               values[std::int64_t{row} * e.in_width + col]);
                }
            }
        }
    }
    sum = block_sum(sum);
    if (threadIdx.x == 0) {
        (bias ? db + o : dw + block)[0] = static_cast<float>(sum);
    }
}

class GroupedConv2dOp final : public Op {
 public:
    GroupedConv2dOp(const Context& context, const Conv2dShape& s)
        : context_(context), shape_(s), extents_{s.in.channels,    s.in.height,      s.in.width,
                                                 s.out_channels,   s.out().height,   s.out().width,
                                                 s.kernel,         s.stride,         s.padding,
                                                 s.group_inputs(), s.group_outputs()} {
        if (s.weight_elems() + s.out_channels > 0x7fffffff) {
            throw usage_error("a convolution in groups has more than 2^31 weights");
        }
    }
    OpNeeds needs() const override { return {}; }
    void forward(const Batch& batch, const OpIo& io) override {
        start("grouped_conv2d_forward", grouped_forward_kernel, shape_.out().elems() * batch.n,
              io.x.f32(), io.params[0].f32(), io.params[1].f32(), io.y.f32());
    }
    void backward_params(const Batch& batch, const OpIo& io) override {
        if (batch.n == 0) {
            return zero_gradients(context_, shape_.weight_elems(), shape_.out_channels, io);
        }
        const auto blocks = static_cast<unsigned>(shape_.weight_elems() + shape_.out_channels);
        launch("grouped_conv2d_backward_params", grouped_backward_params_kernel, dim3(blocks),
               dim3(kElementwiseBlock), context_.stream, extents_, batch.n, io.x.f32(), io.dy.f32(),
               io.grads[0].f32(), io.grads[1].f32());
    }
    void backward_input(const Batch& batch, const OpIo& io) override {
        start("grouped_conv2d_backward_input", grouped_backward_input_kernel,
              shape_.in.elems() * batch.n, io.dy.f32(), io.params[0].f32(), io.dx.f32());
    }

 private:
    template <typename... P, typename... A>
    void start(const char* name, void (*kernel)(std::int64_t, Grouped, P...), std::int64_t elems,
               A... arguments) const {
        if (elems > 0) {
            const std::int64_t blocks = (elems + kElementwiseBlock - 1) / kElementwiseBlock;
            launch(name, kernel, dim3(static_cast<unsigned>(blocks)), dim3(kElementwiseBlock),
                   context_.stream, elems, extents_, arguments...);
        }
    }

    const Context context_;
    const Conv2dShape shape_;
    const Grouped extents_;
};

}  // namespace

std::unique_ptr<Op> make_op(const Context& context, const GroupedConv2dSpec& spec, const OpSizes&) {
    return std::make_unique<GroupedConv2dOp>(context, spec.shape);
}

}  // namespace gyre::SIMT_NAMESPACE
