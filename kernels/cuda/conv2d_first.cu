// The convolution of a net's beginning, of few input channels, before one on tensor cores: of
// stride 1, with a ReLU, its output channels last (kernels/ops/specs.hpp).
//
//   y[i][p][o] = max(0, b[o] + sum over taps t = (c, kh, kw) of w[o][t] x(i, p, t)), in TF32
//   dw[o][t] = sum over i, p of dy[i][p][o] x(i, p, t);  db[o] = the sum of dy[i][p][o]
//   dx[i][c][h][w] = the sum over o and the positions p of whose window the pixel is tap t
//
// x(i, p, t): the pixel of x [n][C][H][W] under tap t of the window at p, zero in the padding.
// Forward: a thread computes 4 channels of 4 positions; a block of 256 threads keeps the weights
// in shared memory, [tap][channel]. Bytes 4 n (C H W + O P), most of them y; FLOPs 2 n O P taps.
// dw: a block has a part of all positions; of each 256 / O, and its threads one channel each, all
// taps of which they keep in registers; they are added in shared memory in order, and the parts
// by a second kernel (add_parts.cuh): at most 512, as many on every GPU. Bytes as forward.
// dx: one thread to a pixel.
#include <algorithm>

#include "kernels/cuda/add_parts.cuh"
#include "kernels/cuda/conv2d.cuh"
#include "kernels/cuda/elementwise.cuh"

namespace gyre::SIMT_NAMESPACE {
namespace {

constexpr int kBlock = 256;
constexpr int kPositions = 4;  // of a thread, forward
constexpr int kMostParts = 512;
constexpr int kPartPositions = 256;  // of a part, at least

struct FirstShape {
    int channels, height, width, out_channels, out_height, out_width, kernel, padding;
    int plane() const { return out_height * out_width; }
    int taps() const { return channels * kernel * kernel; }
};

// The window at a position: where its first pixel would be, and its row and column.
struct Window {
    int offset, h, w;
};
__device__ __forceinline__ Window window_at(const FirstShape& s, int position) {
    const int row = position / s.out_width, image = row / s.out_height;
    const int h = row - image * s.out_height - s.padding;
    const int w = position - row * s.out_width - s.padding;
    return {(image * s.channels * s.height + h) * s.width + w, h, w};
}
// kKernel is the extent of a window.
template <int kKernel>
__device__ __forceinline__ float pixel(const FirstShape& s, const float* x, const Window& window,
                                       int tap) {
    const int c = tap / (kKernel * kKernel), kh = tap / kKernel % kKernel, kw = tap % kKernel;
    const bool inside = static_cast<unsigned>(window.h + kh) < static_cast<unsigned>(s.height) &&
                        static_cast<unsigned>(window.w + kw) < static_cast<unsigned>(s.width);
    return inside ? x[window.offset + (c * s.height + kh) * s.width + kw] : 0.0f;
}

template <int kChannels, int kKernel>
__global__ void __launch_bounds__(kBlock)
    forward_kernel(FirstShape s, int positions, const float* x, const float* w, const float* b,
                   float* y) {
    constexpr int kTaps = kChannels * kKernel * kKernel;
    SIMT_DYNAMIC_SHARED(float, weights);  // [kTaps][out_channels]
    for (int i = static_cast<int>(threadIdx.x); i < kTaps * s.out_channels; i += kBlock) {
        weights[i % kTaps * s.out_channels + i / kTaps] = w[i];
    }
    __syncthreads();
    const int quads = s.out_channels / 4, groups = kBlock / quads;
    const int group = static_cast<int>(threadIdx.x) / quads;
    const int channel = (static_cast<int>(threadIdx.x) - group * quads) * 4;
    if (group >= groups) {
        return;
    }
    const int first = (static_cast<int>(blockIdx.x) * groups + group) * kPositions;
    Window windows[kPositions];
    float sum[kPositions][4];
    SIMT_UNROLL
    for (int p = 0; p < kPositions; ++p) {
        windows[p] = window_at(s, min(first + p, positions - 1));
        read4(b + channel, sum[p]);
    }
    SIMT_UNROLL
    for (int tap = 0; tap < kTaps; ++tap) {
        float of_tap[4];
        read4(weights + tap * s.out_channels + channel, of_tap);
        SIMT_UNROLL
        for (int p = 0; p < kPositions; ++p) {
            const float value = pixel<kKernel>(s, x, windows[p], tap);
            SIMT_UNROLL
            for (int j = 0; j < 4; ++j) {
                sum[p][j] += of_tap[j] * value;
            }
        }
    }
    SIMT_UNROLL
    for (int p = 0; p < kPositions; ++p) {
        if (first + p < positions) {
            SIMT_UNROLL
            for (int j = 0; j < 4; ++j) {
                const std::uint32_t bits = to_tf32(sum[p][j] <= 0.0f ? 0.0f : sum[p][j]);
                memcpy(&sum[p][j], &bits, sizeof bits);
            }
            store4(y + (first + p) * s.out_channels + channel,
                   make_float4(sum[p][0], sum[p][1], sum[p][2], sum[p][3]));
        }
    }
}

// partial [part][kTaps + 1][out_channels], the bias last.
template <int kChannels, int kKernel>
__global__ void __launch_bounds__(kBlock)
    weights_kernel(FirstShape s, int positions, int part_positions, const float* x, const float* dy,
                   float* partial) {
    constexpr int kTaps = kChannels * kKernel * kKernel;
    SIMT_DYNAMIC_SHARED(float, sums);  // [groups][out_channels]
    const int groups = kBlock / s.out_channels;
    const int group = static_cast<int>(threadIdx.x) / s.out_channels;
    const int channel = static_cast<int>(threadIdx.x) - group * s.out_channels;
    const int begin = static_cast<int>(blockIdx.x) * part_positions;
    const int end = min(begin + part_positions, positions);
    float sum[kTaps + 1] = {};
    if (group < groups) {
        Window window = window_at(s, begin + group);
        const int w_end = s.out_width - s.padding, h_end = s.out_height - s.padding;
        for (int position = begin + group; position < end; position += groups) {
            const float d = dy[position * s.out_channels + channel];
            SIMT_UNROLL
            for (int tap = 0; tap < kTaps; ++tap) {
                sum[tap] += d * pixel<kKernel>(s, x, window, tap);
            }
            sum[kTaps] += d;
            window.w += groups;
            window.offset += groups;
            while (window.w >= w_end) {  // into the next row, and image
                window.w -= s.out_width;
                window.offset += s.width - s.out_width;
                if (++window.h >= h_end) {
                    window.h -= s.out_height;
                    window.offset += ((s.channels * s.height) - s.out_height) * s.width;
                }
            }
        }
    }
    SIMT_UNROLL
    for (int tap = 0; tap <= kTaps; ++tap) {
        if (group < groups) {
            sums[group * s.out_channels + channel] = sum[tap];
        }
        __syncthreads();
        if (group == 0) {
            float total = 0.0f;
            for (int g = 0; g < groups; ++g) {
                total += sums[g * s.out_channels + channel];
            }
            partial[(static_cast<int>(blockIdx.x) * (kTaps + 1) + tap) * s.out_channels + channel] =
                total;
        }
        __syncthreads();
    }
}

// One thread of a block's first row to a gradient (tap, channel).
__global__ void add_parts_kernel(int parts, int taps, int out_channels, const float* partial,
                                 float* dw, float* db) {
    const int elems = (taps + 1) * out_channels;
    const float sum = sum_of_parts(parts, elems, partial);
    const int i = static_cast<int>(blockIdx.x * kAddColumns + threadIdx.x);
    if (threadIdx.y == 0 && i < elems) {
        const int tap = i / out_channels, channel = i - tap * out_channels;
        if (tap < taps) {
            dw[channel * taps + tap] = sum;
        } else {
            db[channel] = sum;
        }
    }
}

__global__ void __launch_bounds__(kBlock)
    input_kernel(FirstShape s, int elems, const float* dy, const float* w, float* dx) {
    const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
    if (i >= elems) {
        return;
    }
    const int at_w = i % s.width, at_h = i / s.width % s.height;
    const int c = i / (s.width * s.height) % s.channels;
    const int image = i / (s.width * s.height * s.channels);
    float sum = 0.0f;
    for (int kh = 0; kh < s.kernel; ++kh) {
        for (int kw = 0; kw < s.kernel; ++kw) {
            const int oh = at_h + s.padding - kh, ow = at_w + s.padding - kw;
            if (oh < 0 || oh >= s.out_height || ow < 0 || ow >= s.out_width) {
                continue;
            }
            const float* d = dy + ((image * s.out_height + oh) * s.out_width + ow) * s.out_channels;
            const float* of_tap = w + (c * s.kernel + kh) * s.kernel + kw;
            for (int o = 0; o < s.out_channels; ++o) {
                sum += d[o] * of_tap[o * s.channels * s.kernel * s.kernel];
            }
        }
    }
    dx[i] = sum;
}

template <int kChannels, int kKernel>
class FirstConv2dOp final : public Op {
 public:
    FirstConv2dOp(const Context& context, const Conv2dShape& s, const OpSizes& sizes)
        : context_(context), shape_(s), s_{s.in.channels,  s.in.height,    s.in.width,
                                           s.out_channels, s.out().height, s.out().width,
                                           s.kernel,       s.padding} {
        context.workspace.reserve(static_cast<std::size_t>(partial_elems(sizes.train_images)) *
                                  sizeof(float));
    }
    OpNeeds needs() const override { return {}; }
    void forward(const Batch& batch, const OpIo& io) override {
        const int positions = batch.n * s_.plane();
        const int block_positions = kBlock / (s_.out_channels / 4) * kPositions;
        if (positions > 0) {
            launch(
                "conv2d_first_forward", forward_kernel<kChannels, kKernel>,
                dim3(blocks(positions, block_positions)), dim3(kBlock),
                SharedBytes{static_cast<std::size_t>(s_.taps() * s_.out_channels) * sizeof(float)},
                context_.stream, s_, positions, io.x.f32(), io.params[0].f32(), io.params[1].f32(),
                io.y.f32());
        }
    }
    void backward_params(const Batch& batch, const OpIo& io) override {
        if (batch.n == 0) {
            return zero_gradients(context_, shape_.weight_elems(), s_.out_channels, io);
        }
        const int positions = batch.n * s_.plane(), each = part_positions(positions);
        const unsigned parts = blocks(positions, each);
        float* const partial = context_.workspace.floats(partial_elems(batch.n));
        launch("conv2d_first_weights", weights_kernel<kChannels, kKernel>, dim3(parts),
               dim3(kBlock), SharedBytes{kBlock * sizeof(float)}, context_.stream, s_, positions,
               each, io.x.f32(), io.dy.f32(), partial);
        launch("conv2d_first_add", add_parts_kernel, add_blocks((s_.taps() + 1) * s_.out_channels),
               dim3(kAddColumns, kAddRows), context_.stream, static_cast<int>(parts), s_.taps(),
               s_.out_channels, static_cast<const float*>(partial), io.grads[0].f32(),
               io.grads[1].f32());
    }
    void backward_input(const Batch& batch, const OpIo& io) override {
        const auto elems = static_cast<int>(batch.n * shape_.in.elems());
        if (elems > 0) {
            launch("conv2d_first_input", input_kernel, dim3(blocks(elems, kBlock)), dim3(kBlock),
                   context_.stream, s_, elems, io.dy.f32(), io.params[0].f32(), io.dx.f32());
        }
    }

 private:
    static unsigned blocks(int elems, int each) {
        return static_cast<unsigned>((elems + each - 1) / each);
    }
    static int part_positions(int positions) {
        return std::max(kPartPositions, (positions + kMostParts - 1) / kMostParts);
    }
    // For up to n images.
    std::int64_t partial_elems(int n) const {
        const unsigned parts = blocks(std::max(n, 1) * s_.plane(), kPartPositions);
        return std::int64_t{std::min<unsigned>(parts, kMostParts)} * (s_.taps() + 1) *
               s_.out_channels;
    }

    const Context context_;
    const Conv2dShape shape_;
    const FirstShape s_;
};

}  // namespace

std::unique_ptr<Op> make_first_conv(const Context& context, const Conv2dSpec& spec,
                                    const OpSizes& sizes) {
    const Conv2dShape& s = spec.shape;
    // Kernels count elements over all images in 32 bits.
    const std::int64_t elems =
        std::max(s.in.elems(), s.out().elems()) * (std::int64_t{sizes.most()} + 1);
    const bool can = context.tf32 && spec.out_channels_last && !spec.in_channels_last &&
                     spec.relu && spec.pool_kernel == 0 && spec.dropout == 0.0f && s.stride == 1 &&
                     s.padding < s.kernel && s.out_channels % 4 == 0 && s.out_channels <= kBlock &&
                     elems < (std::int64_t{1} << 31) - (1 << 20);
    if (!can) {
        return nullptr;
    }
    if (s.in.channels == 1 && s.kernel == 3) {
        return std::make_unique<FirstConv2dOp<1, 3>>(context, s, sizes);
    }
    if (s.in.channels == 1 && s.kernel == 5) {
        return std::make_unique<FirstConv2dOp<1, 5>>(context, s, sizes);
    }
    if (s.in.channels == 3 && s.kernel == 3) {
        return std::make_unique<FirstConv2dOp<3, 3>>(context, s, sizes);
    }
    return nullptr;
}

}  // namespace gyre::SIMT_NAMESPACE
