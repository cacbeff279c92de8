// A net's first convolution, with few input channels and stride 1, fused with a ReLU, before one on
// tensor cores; its output is channels last (kernels/ops/specs.hpp).
//
//   y[i][p][o] = max(0, b[o] + sum over taps t = (c, kh, kw) of w[o][t] x(i, p, t))
//   dw[o][t] = sum over i, p of dy[i][p][o] x(i, p, t);  db[o] = sum of dy[i][p][o]
//   dx[i][c][h][w] = sum over o and the positions p in whose window the pixel is tap t
//
// y is rounded as products read it, to TF32 or 16 bits; w only if x and y have 16 bits. x(i, p, t):
// the pixel of x [n][C][H][W] under tap t of the window at p, zero in the padding. Forward: a
// thread computes 4 channels of 4 positions in a row, whose windows share pixels; a block of 256
// threads keeps the weights in shared memory, [tap][channel]. Bytes 4 n (C H W + O P), most of them
// for y; FLOPs 2 n O P taps. dw: each block takes a part of all positions, 512 / O of them at a
// time; its threads keep all taps of two channels in registers, which are added in shared memory in
// order. The last blocks to finish add the parts (part_sums.cuh), of which there are at most 512,
// the same number on every GPU. Bytes as forward. dx: one thread per pixel.
#include <algorithm>

#include "kernels/cuda/conv2d.cuh"
#include "kernels/cuda/elementwise.cuh"
#include "kernels/cuda/part_sums.cuh"
#include "kernels/cuda/tensor_math.cuh"

namespace gyre::SIMT_NAMESPACE {
namespace {

constexpr int kBlock = 256;
constexpr int kPositions = 4;  // per thread in the forward pass, in one row
constexpr int kMostParts = 512;
constexpr int kPartPositions = 256;  // per part, at least

struct FirstShape {
    int channels, height, width, out_channels, out_height, out_width, kernel, padding;
    int plane() const { return out_height * out_width; }
    // Groups of up to kPositions per row.
    GYRE_HOST_DEVICE int runs() const { return (out_width + kPositions - 1) / kPositions; }
    int taps() const { return channels * kernel * kernel; }
};

// The window at a position, where `row` counts over all images: the offset of its first pixel
// (possibly in the padding), and its row and column.
struct Window {
    int offset, h, w;
};
__device__ __forceinline__ Window window_at(const FirstShape& s, int row, int column) {
    const int image = row / s.out_height;
    const int h = row - image * s.out_height - s.padding, w = column - s.padding;
    return {(image * s.channels * s.height + h) * s.width + w, h, w};
}
template <typename Math>
__device__ __forceinline__ float pixel(const FirstShape& s, const typename Math::Elem* x,
                                       const Window& window, int c, int kh, int kw) {
    const bool inside = static_cast<unsigned>(window.h + kh) < static_cast<unsigned>(s.height) &&
                        static_cast<unsigned>(window.w + kw) < static_cast<unsigned>(s.width);
    return inside ? Math::load(x[window.offset + (c * s.height + kh) * s.width + kw]) : 0.0f;
}

template <typename Math, int kChannels, int kKernel>
__global__ void __launch_bounds__(kBlock)
    forward_kernel(FirstShape s, int all_runs, const typename Math::Elem* x, const float* w,
                   const float* b, typename Math::Elem* y) {
    constexpr int kTaps = kChannels * kKernel * kKernel;
    SIMT_DYNAMIC_SHARED(float, weights);  // [kTaps][out_channels]
    for (int i = static_cast<int>(threadIdx.x); i < kTaps * s.out_channels; i += kBlock) {
        weights[i % kTaps * s.out_channels + i / kTaps] = rounded<Math>(w[i]);
    }
    __syncthreads();
    const int quads = s.out_channels / 4, groups = kBlock / quads;
    const int group = static_cast<int>(threadIdx.x) / quads;
    const int channel = (static_cast<int>(threadIdx.x) - group * quads) * 4;
    if (group >= groups) {
        return;
    }
    const int run = static_cast<int>(blockIdx.x) * groups + group;
    if (run >= all_runs) {
        return;
    }
    const int row = run / s.runs(), first = (run - row * s.runs()) * kPositions;
    const Window window = window_at(s, row, first);
    float sum[kPositions][4];
    SIMT_UNROLL
    for (int p = 0; p < kPositions; ++p) {
        read4(b + channel, sum[p]);
    }
    SIMT_NO_UNROLL
    for (int tap_row = 0; tap_row < kChannels * kKernel; ++tap_row) {
        const int c = tap_row / kKernel, kh = tap_row % kKernel;
        float line[kPositions + kKernel - 1];
        SIMT_UNROLL
        for (int i = 0; i < kPositions + kKernel - 1; ++i) {
            line[i] = pixel<Math>(s, x, window, c, kh, i);
        }
        SIMT_UNROLL
        for (int kw = 0; kw < kKernel; ++kw) {
            float of_tap[4];
            read4(weights + (tap_row * kKernel + kw) * s.out_channels + channel, of_tap);
            SIMT_UNROLL
            for (int p = 0; p < kPositions; ++p) {
                SIMT_UNROLL
                for (int j = 0; j < 4; ++j) {
                    sum[p][j] += of_tap[j] * line[p + kw];
                }
            }
        }
    }
    SIMT_UNROLL
    for (int p = 0; p < kPositions; ++p) {
        if (first + p < s.out_width) {
            SIMT_UNROLL
            for (int j = 0; j < 4; ++j) {
                sum[p][j] = sum[p][j] <= 0.0f ? 0.0f : sum[p][j];
            }
            Math::store_operands(y + (row * s.out_width + first + p) * s.out_channels + channel,
                                 sum[p]);
        }
    }
}

// Adds parts, as required by add_as_last. elems: per part.
template <int kTaps>
__device__ __forceinline__ void add_taps(int out_channels, float* partial, int first, int count,
                                         int step, bool all, float* dw, float* db) {
    const int elems = (kTaps + 1) * out_channels;
    for (int i = static_cast<int>(threadIdx.x); i < elems; i += kBlock) {
        float* const to = partial + first * elems + i;
        float sum = 0.0f;
        SIMT_UNROLL_BY_4
        for (int part = 0; part < count; ++part) {
            sum += to[part * step * elems];
        }
        const int tap = i / out_channels, channel = i - tap * out_channels;
        if (!all) {
            *to = sum;
        } else if (tap < kTaps) {
            dw[channel * kTaps + tap] = sum;
        } else {
            db[channel] = sum;
        }
    }
}

// Loads two values; `at` is aligned for both.
template <typename Math>
__device__ __forceinline__ float2 load2(const typename Math::Elem* at) {
    if constexpr (Math::kType == DataType::float32) {
        return load_vector<float2>(at);
    } else {
        const auto word = load_vector<std::uint32_t>(at);
        float2 two;
        two.x = Math::load(static_cast<std::uint16_t>(word));
        two.y = Math::load(static_cast<std::uint16_t>(word >> 16));
        return two;
    }
}

// partial [part][kTaps + 1][out_channels], with the bias last; counts [groups + 1].
template <typename Math, int kChannels, int kKernel>
__global__ void __launch_bounds__(kBlock, 2)
    weights_kernel(FirstShape s, int positions, int part_positions, PartGroups parts,
                   const typename Math::Elem* x, const typename Math::Elem* dy, float* partial,
                   std::uint32_t* counts, float* dw, float* db) {
    constexpr int kTaps = kChannels * kKernel * kKernel;
    SIMT_DYNAMIC_SHARED(float, sums);  // [groups][out_channels]
    const int pairs = s.out_channels / 2, groups = kBlock / pairs;
    const int group = static_cast<int>(threadIdx.x) / pairs;
    const int channel = (static_cast<int>(threadIdx.x) - group * pairs) * 2;
    const int begin = static_cast<int>(blockIdx.x) * part_positions;
    const int end = min(begin + part_positions, positions);
    float sum[kTaps + 1][2] = {};
    if (group < groups) {
        const int row = (begin + group) / s.out_width;
        Window window = window_at(s, row, begin + group - row * s.out_width);
        const int w_end = s.out_width - s.padding, h_end = s.out_height - s.padding;
        for (int position = begin + group; position < end; position += groups) {
            const float2 d = load2<Math>(dy + position * s.out_channels + channel);
            SIMT_UNROLL
            for (int tap = 0; tap < kTaps; ++tap) {
                const int c = tap / (kKernel * kKernel), kh = tap / kKernel % kKernel;
                const float value = pixel<Math>(s, x, window, c, kh, tap % kKernel);
                sum[tap][0] += d.x * value;
                sum[tap][1] += d.y * value;
            }
            sum[kTaps][0] += d.x;
            sum[kTaps][1] += d.y;
            window.w += groups;
            window.offset += groups;
            while (window.w >= w_end) {  // advance to the next row, and image
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
            Tf32Math::store_values(sums + group * s.out_channels + channel, sum[tap][0],
                                   sum[tap][1]);
        }
        __syncthreads();
        for (int o = static_cast<int>(threadIdx.x); o < s.out_channels; o += kBlock) {
            float total = 0.0f;
            for (int g = 0; g < groups; ++g) {
                total += sums[g * s.out_channels + o];
            }
            partial[(static_cast<int>(blockIdx.x) * (kTaps + 1) + tap) * s.out_channels + o] =
                total;
        }
        __syncthreads();
    }
    add_as_last(counts, parts, static_cast<int>(blockIdx.x),
                [&](int first, int count, int step, bool all) {
                    add_taps<kTaps>(s.out_channels, partial, first, count, step, all, dw, db);
                });
}

template <typename Math>
__global__ void __launch_bounds__(kBlock)
    input_kernel(FirstShape s, int elems, const typename Math::Elem* dy, const float* w,
                 typename Math::Elem* dx) {
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
            const auto* d = dy + ((image * s.out_height + oh) * s.out_width + ow) * s.out_channels;
            const float* of_tap = w + (c * s.kernel + kh) * s.kernel + kw;
            for (int o = 0; o < s.out_channels; ++o) {
                sum +=
                    Math::load(d[o]) * rounded<Math>(of_tap[o * s.channels * s.kernel * s.kernel]);
            }
        }
    }
    dx[i] = Math::value(sum);
}

template <typename Math, int kChannels, int kKernel>
class FirstConv2dOp final : public Op {
    using Elem = typename Math::Elem;

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
        const int runs = batch.n * s_.out_height * s_.runs();
        if (runs > 0) {
            launch(
                "conv2d_first_forward", forward_kernel<Math, kChannels, kKernel>,
                dim3(blocks(runs, kBlock / (s_.out_channels / 4))), dim3(kBlock),
                SharedBytes{static_cast<std::size_t>(s_.taps() * s_.out_channels) * sizeof(float)},
                context_.stream, s_, runs, values(io.x), io.params[0].f32(), io.params[1].f32(),
                values(io.y));
        }
    }
    void backward_params(const Batch& batch, const OpIo& io) override {
        if (batch.n == 0) {
            return zero_gradients(context_, shape_.weight_elems(), s_.out_channels, io);
        }
        const int positions = batch.n * s_.plane(), each = part_positions(positions);
        const unsigned parts = blocks(positions, each);
        float* const partial = context_.workspace.floats(partial_elems(batch.n));
        launch("conv2d_first_weights", weights_kernel<Math, kChannels, kKernel>, dim3(parts),
               dim3(kBlock), SharedBytes{2 * kBlock * sizeof(float)}, context_.stream, s_,
               positions, each, part_groups(static_cast<int>(parts)), values(io.x), values(io.dy),
               partial, context_.workspace.counts(), io.grads[0].f32(), io.grads[1].f32());
    }
    void backward_input(const Batch& batch, const OpIo& io) override {
        const auto elems = static_cast<int>(batch.n * shape_.in.elems());
        if (elems > 0) {
            launch("conv2d_first_input", input_kernel<Math>, dim3(blocks(elems, kBlock)),
                   dim3(kBlock), context_.stream, s_, elems, values(io.dy), io.params[0].f32(),
                   values(io.dx));
        }
    }

 private:
    static Elem* values(const Tensor& tensor) { return static_cast<Elem*>(tensor.data); }
    static unsigned blocks(int elems, int each) {
        return static_cast<unsigned>((elems + each - 1) / each);
    }
    static int part_positions(int positions) {
        return std::max(kPartPositions, (positions + kMostParts - 1) / kMostParts);
    }
    // The size of `partial` for up to n images.
    std::int64_t partial_elems(int n) const {
        const unsigned parts = blocks(std::max(n, 1) * s_.plane(), kPartPositions);
        return std::int64_t{std::min<unsigned>(parts, kMostParts)} * (s_.taps() + 1) *
               s_.out_channels;
    }

    const Context context_;
    const Conv2dShape shape_;
    const FirstShape s_;
};

template <typename Math>
using FirstConv1x3 = FirstConv2dOp<Math, 1, 3>;
template <typename Math>
using FirstConv1x5 = FirstConv2dOp<Math, 1, 5>;
template <typename Math>
using FirstConv3x3 = FirstConv2dOp<Math, 3, 3>;

}  // namespace

std::unique_ptr<Op> make_first_conv(const Context& context, const Conv2dSpec& spec,
                                    const OpSizes& sizes, DataType type) {
    const Conv2dShape& s = spec.shape;
    // Kernels index elements over all images in 32 bits.
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
        return make_for_math<FirstConv1x3>(type, context, s, sizes);
    }
    if (s.in.channels == 1 && s.kernel == 5) {
        return make_for_math<FirstConv1x5>(type, context, s, sizes);
    }
    if (s.in.channels == 3 && s.kernel == 3) {
        return make_for_math<FirstConv3x3>(type, context, s, sizes);
    }
    return nullptr;
}

}  // namespace gyre::SIMT_NAMESPACE
