// Convolution without a matrix product, for stride 1, kernels of 1, 3 or 5 and few channels, where
// the whole input of an image and all weights that a block needs fit shared memory.
//
// Forward. y[i][o][h][w] = b[o] + sum over c, kh, kw of w[o][c][kh][kw] x[i][c][h+kh-p][w+kw-p].
// The data gradient is the same sum over dy, with the kernel turned by 180 degrees, in and out
// channels exchanged, and padding K-1-p.
//   Block: 256 threads; grid (groups of images, groups of output channels). A block keeps the
//   padded inputs of its images and the weights of its channels, [tap][channel], in shared memory.
//   A thread computes 4 neighbours of a row for kOut channels: for each input row under the kernel
//   it reads 8 pixels (two 16-byte accesses), then K times the weights of its channels (the same
//   for most of its warp) for 4 kOut multiply-adds each. FLOPs 2 n O C K K OH OW; bytes 4 n (C H W
//   + O OH OW), each pixel and output once for each group of output channels.
//
// Weight gradient. dw[o][c][kh][kw] = sum over i, h, w of dy[i][o][h][w] x[i][c][h+kh-p][w+kw-p];
// db[o] = sum of dy[i][o].
//   Block: 256 threads; grid (groups of images, groups of output channels). A thread sums for two
//   output channels, one input channel, one kernel row and some rows of dy, over the images of its
//   block; the rows are added in shared memory, in order, and written as the block's partial
//   gradient [group of images][O C K K, then O]; a second kernel adds the groups in order.
//   FLOPs as forward; bytes as forward, plus 8 O (C K K + 1) for each group of images.
#include <algorithm>

#include "kernels/cuda/add_parts.cuh"
#include "kernels/cuda/conv2d.cuh"
#include "kernels/cuda/elementwise.cuh"

namespace gyre::SIMT_NAMESPACE::direct {
namespace {

constexpr int kBlock = 256;
constexpr int kPixels = 4;            // neighbours of a row that a thread computes
constexpr int kInputElems = 5120;     // of shared memory, 20 KiB
constexpr int kWeightElems = 5120;    // 20 KiB
constexpr int kGradientElems = 6144;  // 24 KiB

int round_up(int value, int step) {
    return (value + step - 1) / step * step;
}

// One layer of images with room for a window to slide over: kernel, and what a block works on.
struct Window {
    int channels, height, width;  // of the input
    int padding;
    int out_channels, out_height, out_width;
    int pitch;  // of an input row in shared memory: padding, pixels, and what the last quad reads

    int rows() const { return height + 2 * padding; }
    int input_elems() const { return channels * rows() * pitch; }
};

Window make_window(const Shape& in, const Shape& out, int padding) {
    return {in.channels,  in.height,  in.width,  padding,
            out.channels, out.height, out.width, round_up(out.width, kPixels) + kPixels};
}

Window forward_window(const Conv2dShape& s) {
    return make_window(s.in, s.out(), s.padding);
}
Window backward_window(const Conv2dShape& s) {
    return make_window(s.out(), s.in, s.kernel - 1 - s.padding);
}

bool suits(const Conv2dShape& s) {
    return s.stride == 1 && (s.kernel == 1 || s.kernel == 3 || s.kernel == 5) &&
           s.padding < s.kernel;
}

// Channels of a thread: two, four or eight.
int thread_channels(int out_channels) {
    return out_channels % 8 == 0 ? 8 : out_channels % 4 == 0 ? 4 : 2;
}

bool fits(const Window& window, int kernel) {
    const int taps = window.channels * kernel * kernel;
    // Beyond this a matrix product shares more than a direct sum does.
    return taps <= 500 && window.input_elems() <= kInputElems &&
           taps * thread_channels(window.out_channels) <= kWeightElems;
}

// Reads images first .. first + count of `from` [n][channels][height][width] into `to`
// [count][channels][rows][pitch], zeros around.
__device__ __forceinline__ void read_padded(const Window& window, const float* from,
                                            std::int64_t first, int count, float* to) {
    const int rows = window.height + 2 * window.padding;
    const int elems = window.channels * rows * window.pitch;
    const float* image = from + first * window.channels * window.height * window.width;
    for (int i = static_cast<int>(threadIdx.x); i < count * elems; i += kBlock) {
        const int row = i / window.pitch, w = i % window.pitch - window.padding;
        const int plane = row / rows, h = row % rows - window.padding;
        const bool inside = h >= 0 && h < window.height && w >= 0 && w < window.width;
        to[i] = inside ? image[(plane * window.height + h) * window.width + w] : 0.0f;
    }
}

// What a row of the kernel needs of an input row for kPixels outputs.
template <int kKernel>
__device__ __forceinline__ void read_pixels(const float* from, float (&pixel)[2 * kPixels]) {
    read4(from, pixel);
    if constexpr (kKernel > 1) {
        read4(from + kPixels, pixel + kPixels);
    }
}

// Where the weight of (output channel, input channel, tap) lies.
struct WeightLayout {
    int out_stride, in_stride;
    bool turned;  // by 180 degrees
};

struct ForwardPlan {
    Window window;
    WeightLayout layout;
    int images;        // of a block
    int out_channels;  // of a block, a multiple of kOut
};

// Reads the weights of a block's output channels into `to` [channel][tap][output channel].
template <int kTaps>
__device__ __forceinline__ void read_weights(const ForwardPlan& plan, int first_out, const float* w,
                                             float* to) {
    for (int i = static_cast<int>(threadIdx.x);
         i < plan.window.channels * kTaps * plan.out_channels; i += kBlock) {
        const int out = i % plan.out_channels, at = i / plan.out_channels;
        const int in = at / kTaps, tap = at % kTaps;
        const int from = (first_out + out) * plan.layout.out_stride + in * plan.layout.in_stride +
                         (plan.layout.turned ? kTaps - 1 - tap : tap);
        to[i] = first_out + out < plan.window.out_channels ? w[from] : 0.0f;
    }
}

template <int kKernel, int kOut>
__global__ void __launch_bounds__(kBlock)
    direct_forward_kernel(ForwardPlan plan, int n, const float* x, const float* w, const float* b,
                          float* y) {
    SIMT_SHARED(float, input, [kInputElems]);
    SIMT_SHARED(float, weights, [kWeightElems]);
    constexpr int kTaps = kKernel * kKernel;
    const Window& window = plan.window;
    const int first_image = static_cast<int>(blockIdx.x) * plan.images;
    const int images = min(plan.images, n - first_image);
    const int first_out = static_cast<int>(blockIdx.y) * plan.out_channels;

    read_padded(window, x, first_image, images, input);
    read_weights<kTaps>(plan, first_out, w, weights);
    __syncthreads();

    const int rows = window.height + 2 * window.padding;
    const int quads = (window.out_width + kPixels - 1) / kPixels;
    const int groups = plan.out_channels / kOut;
    const int items = images * groups * window.out_height * quads;
    for (int item = static_cast<int>(threadIdx.x); item < items; item += kBlock) {
        const int quad = item % quads, row = item / quads % window.out_height;
        const int group = item / quads / window.out_height % groups;
        const int image = item / quads / window.out_height / groups;
        float sum[kOut][kPixels] = {};
        for (int in = 0; in < window.channels; ++in) {
            SIMT_UNROLL
            for (int kh = 0; kh < kKernel; ++kh) {
                const float* from =
                    input + ((image * window.channels + in) * rows + row + kh) * window.pitch +
                    quad * kPixels;
                float pixel[2 * kPixels];
                read_pixels<kKernel>(from, pixel);
                const float* tap =
                    weights + (in * kTaps + kh * kKernel) * plan.out_channels + group * kOut;
                SIMT_UNROLL
                for (int kw = 0; kw < kKernel; ++kw) {
                    SIMT_UNROLL
                    for (int o = 0; o < kOut; ++o) {
                        const float weight = tap[kw * plan.out_channels + o];
                        SIMT_UNROLL
                        for (int p = 0; p < kPixels; ++p) {
                            sum[o][p] += weight * pixel[kw + p];
                        }
                    }
                }
            }
        }
        SIMT_UNROLL
        for (int o = 0; o < kOut; ++o) {
            const int out = first_out + group * kOut + o;
            if (out >= window.out_channels) {
                break;
            }
            const float bias = b == nullptr ? 0.0f : b[out];
            float* to = y +
                        ((std::int64_t{first_image + image} * window.out_channels + out) *
                             window.out_height +
                         row) *
                            window.out_width +
                        quad * kPixels;
            if (window.out_width % kPixels == 0) {
                store4(to, make_float4(sum[o][0] + bias, sum[o][1] + bias, sum[o][2] + bias,
                                       sum[o][3] + bias));
                continue;
            }
            SIMT_UNROLL
            for (int p = 0; p < kPixels; ++p) {
                if (quad * kPixels + p < window.out_width) {
                    to[p] = sum[o][p] + bias;
                }
            }
        }
    }
}

template <int kKernel, int kOut>
void run_forward(const Context& context, const char* name, ForwardPlan plan, int n, const float* x,
                 const float* w, const float* b, float* y) {
    const Window& window = plan.window;
    const int taps = window.channels * kKernel * kKernel;
    // Enough blocks for the GPU first, then as many images as fit, so that weights are read seldom.
    plan.images = std::clamp((n + context.multiprocessors * 2 - 1) / (context.multiprocessors * 2),
                             1, kInputElems / window.input_elems());
    const int blocks = (n + plan.images - 1) / plan.images;
    const int all_groups = round_up(window.out_channels, kOut) / kOut;
    const int most_groups = std::min(all_groups, kWeightElems / (taps * kOut));
    const int wanted = std::clamp(context.multiprocessors * 2 / blocks, 1, all_groups);
    const int groups = std::min(most_groups, (all_groups + wanted - 1) / wanted);
    plan.out_channels = groups * kOut;
    launch(name, direct_forward_kernel<kKernel, kOut>,
           dim3(static_cast<unsigned>(blocks),
                static_cast<unsigned>((all_groups + groups - 1) / groups)),
           dim3(kBlock), context.stream, plan, n, x, w, b, y);
}

template <int kKernel>
void run_forward(const Context& context, const char* name, const ForwardPlan& plan, int n,
                 const float* x, const float* w, const float* b, float* y) {
    switch (thread_channels(plan.window.out_channels)) {
        case 8:
            return run_forward<kKernel, 8>(context, name, plan, n, x, w, b, y);
        case 4:
            return run_forward<kKernel, 4>(context, name, plan, n, x, w, b, y);
        default:
            return run_forward<kKernel, 2>(context, name, plan, n, x, w, b, y);
    }
}

void run_forward(const Context& context, const char* name, int kernel, const ForwardPlan& plan,
                 int n, const float* x, const float* w, const float* b, float* y) {
    switch (kernel) {
        case 5:
            return run_forward<5>(context, name, plan, n, x, w, b, y);
        case 3:
            return run_forward<3>(context, name, plan, n, x, w, b, y);
        default:
            return run_forward<1>(context, name, plan, n, x, w, b, y);
    }
}

struct WeightsPlan {
    Window window;
    int dy_pitch;      // of a row of dy in shared memory: a multiple of kPixels
    int out_channels;  // of a block, even
    int strips;        // of rows of dy, among threads
    int image_groups;
};

constexpr int kPair = 2;  // output channels of a thread

// sum[kw] += the products of dy and the pixels under column kw of the kernel.
template <int kKernel>
__device__ __forceinline__ void add_products(const float (&d)[kPixels],
                                             const float (&pixel)[2 * kPixels],
                                             float (&sum)[kKernel]) {
    SIMT_UNROLL
    for (int p = 0; p < kPixels; ++p) {
        SIMT_UNROLL
        for (int kw = 0; kw < kKernel; ++kw) {
            sum[kw] += d[p] * pixel[kw + p];
        }
    }
}

__device__ __forceinline__ float add_strips(const float* first, int strips, int distance) {
    float total = 0.0f;
    for (int s = 0; s < strips; ++s) {
        total += first[s * distance];
    }
    return total;
}

// What a thread sums.
struct WeightsItem {
    int kh, in, pair, strip;
};
__device__ __forceinline__ WeightsItem weights_item(int item, int kernel, int channels, int pairs) {
    return {item % kernel, item / kernel % channels, item / kernel / channels % pairs,
            item / kernel / channels / pairs};
}

// An image's dy of `outs` output channels from first_out on, as many rows as the block's channels
// have, and zeros where there is none.
__device__ __forceinline__ void read_gradients(const WeightsPlan& plan, const float* dy, int image,
                                               int first_out, int outs, float* gradient) {
    const Window& window = plan.window;
    const int dy_elems = plan.out_channels * window.out_height * plan.dy_pitch;
    const float* from = dy + (std::int64_t{image} * window.out_channels + first_out) *
                                 window.out_height * window.out_width;
    for (int i = static_cast<int>(threadIdx.x); i < dy_elems; i += kBlock) {
        const int w = i % plan.dy_pitch, row = i / plan.dy_pitch;
        const bool inside = w < window.out_width && row < outs * window.out_height;
        gradient[i] = inside ? from[row * window.out_width + w] : 0.0f;
    }
}

template <int kKernel>
__global__ void __launch_bounds__(kBlock)
    direct_weights_kernel(WeightsPlan plan, int n, const float* x, const float* dy,
                          float* partial) {
    SIMT_SHARED(float, input, [kInputElems]);
    SIMT_SHARED(float, gradient, [kGradientElems]);
    const Window& window = plan.window;
    const int rows = window.height + 2 * window.padding;
    const int first_out = static_cast<int>(blockIdx.y) * plan.out_channels;
    const int outs = min(plan.out_channels, window.out_channels - first_out);

    // Neighbouring threads have the same strip and output channels, so that they read the same dy.
    const int item = static_cast<int>(threadIdx.x);
    const int pairs = plan.out_channels / kPair;
    const auto [kh, in, pair, strip] = weights_item(item, kKernel, window.channels, pairs);
    const bool active = strip < plan.strips;
    const int strip_rows = (window.out_height + plan.strips - 1) / plan.strips;
    const int first_row = strip * strip_rows;
    const int last_row = min(first_row + strip_rows, window.out_height);

    float sum[kPair][kKernel] = {};
    float bias[kPair] = {};
    for (int image = static_cast<int>(blockIdx.x); image < n; image += plan.image_groups) {
        read_padded(window, x, image, 1, input);
        read_gradients(plan, dy, image, first_out, outs, gradient);
        __syncthreads();
        for (int row = first_row; active && row < last_row; ++row) {
            const float* pixels = input + (in * rows + row + kh) * window.pitch;
            const float* gradients =
                gradient + (pair * kPair * window.out_height + row) * plan.dy_pitch;
            for (int w = 0; w < plan.dy_pitch; w += kPixels) {
                float pixel[2 * kPixels];
                read_pixels<kKernel>(pixels + w, pixel);
                SIMT_UNROLL
                for (int o = 0; o < kPair; ++o) {
                    float d[kPixels];
                    read4(gradients + o * window.out_height * plan.dy_pitch + w, d);
                    add_products(d, pixel, sum[o]);
                    if (in == 0 && kh == 0) {
                        bias[o] += (d[0] + d[1]) + (d[2] + d[3]);
                    }
                }
            }
        }
        __syncthreads();  // before the next image takes the place of this
    }

    // The strips of a (pair, channel, row of the kernel) lie `threads` apart.
    const int threads = pairs * window.channels * kKernel;
    const int taps = window.channels * kKernel * kKernel;
    const int group_elems = window.out_channels * (taps + 1);
    float* to = partial + std::int64_t{blockIdx.x} * group_elems;
    SIMT_UNROLL
    for (int o = 0; o < kPair; ++o) {
        // input[] has 5120 floats: K + 1 for each thread at a time.
        SIMT_UNROLL
        for (int kw = 0; kw <= kKernel; ++kw) {
            input[kw * kBlock + item] = kw < kKernel ? sum[o][kw] : bias[o];
        }
        __syncthreads();
        const int out = first_out + pair * kPair + o;
        if (strip == 0 && out < window.out_channels) {
            SIMT_UNROLL
            for (int kw = 0; kw <= kKernel; ++kw) {
                const float total = add_strips(input + kw * kBlock + item, plan.strips, threads);
                if (kw < kKernel) {
                    to[out * taps + (in * kKernel + kh) * kKernel + kw] = total;
                } else if (in == 0 && kh == 0) {
                    to[window.out_channels * taps + out] = total;
                }
            }
        }
        __syncthreads();
    }
}

// One thread of a block's first row to a gradient.
__global__ void add_groups_kernel(int groups, int weights, int outs, const float* partial,
                                  float* dw, float* db) {
    const float sum = sum_of_parts(groups, weights + outs, partial);
    const int elem = static_cast<int>(blockIdx.x * kAddColumns + threadIdx.x);
    if (threadIdx.y == 0 && elem < weights + outs) {
        (elem < weights ? dw[elem] : db[elem - weights]) = sum;
    }
}

WeightsPlan plan_weights(const Context& context, const Conv2dShape& shape, int n) {
    WeightsPlan plan{};
    plan.window = forward_window(shape);
    const Window& window = plan.window;
    plan.dy_pitch = round_up(window.out_width, kPixels);
    const int pair_threads = window.channels * shape.kernel;
    const int pair_elems = kPair * window.out_height * plan.dy_pitch;
    const int all_pairs = (window.out_channels + kPair - 1) / kPair;
    const int pairs = std::min({kBlock / pair_threads, kGradientElems / pair_elems, all_pairs});
    if (pairs == 0) {
        return plan;  // out_channels = 0: impossible
    }
    plan.out_channels = pairs * kPair;
    plan.strips = std::min(kBlock / (pairs * pair_threads), window.out_height);
    const int out_groups = (all_pairs + pairs - 1) / pairs;
    plan.image_groups = std::clamp(context.multiprocessors * 4 / out_groups, 1, std::max(1, n));
    return plan;
}

}  // namespace

bool can_forward(const Conv2dShape& shape) {
    return suits(shape) && fits(forward_window(shape), shape.kernel);
}

bool can_backward_data(const Conv2dShape& shape) {
    return suits(shape) && fits(backward_window(shape), shape.kernel);
}

bool can_backward_weights(const Conv2dShape& shape) {
    const Window window = forward_window(shape);
    return suits(shape) && window.input_elems() <= kInputElems &&
           window.channels * shape.kernel <= 128 &&
           kPair * window.out_height * round_up(window.out_width, kPixels) <= kGradientElems;
}

std::size_t workspace_bytes(const Context& context, const Conv2dShape& shape, int n) {
    if (!can_backward_weights(shape)) {
        return 0;
    }
    const std::int64_t group_elems = shape.weight_elems() + shape.out_channels;
    return static_cast<std::size_t>(plan_weights(context, shape, n).image_groups * group_elems) *
           sizeof(float);
}

void forward(const Context& context, const Conv2dShape& shape, int n, const float* x,
             const float* w, const float* b, float* y) {
    const int taps = shape.kernel * shape.kernel;
    run_forward(context, "conv2d_forward", shape.kernel,
                {forward_window(shape), {shape.in.channels * taps, taps, false}, 0, 0}, n, x, w, b,
                y);
}

void backward_data(const Context& context, const Conv2dShape& shape, int n, const float* dy,
                   const float* w, float* dx) {
    const int taps = shape.kernel * shape.kernel;
    run_forward(context, "conv2d_backward_data", shape.kernel,
                {backward_window(shape), {taps, shape.in.channels * taps, true}, 0, 0}, n, dy, w,
                nullptr, dx);
}

void backward_weights(const Context& context, const Conv2dShape& shape, int n, const float* x,
                      const float* dy, float* dw, float* db) {
    const WeightsPlan plan = plan_weights(context, shape, n);
    const auto weights = static_cast<int>(shape.weight_elems());
    const int elems = weights + shape.out_channels;
    float* partial = context.workspace.floats(std::int64_t{plan.image_groups} * elems);
    const dim3 grid(
        static_cast<unsigned>(plan.image_groups),
        static_cast<unsigned>((shape.out_channels + plan.out_channels - 1) / plan.out_channels));
    const auto kernel = shape.kernel == 5   ? direct_weights_kernel<5>
                        : shape.kernel == 3 ? direct_weights_kernel<3>
                                            : direct_weights_kernel<1>;
    launch("conv2d_backward_weights", kernel, grid, dim3(kBlock), context.stream, plan, n, x, dy,
           partial);
    launch("conv2d_backward_weights", add_groups_kernel, add_blocks(elems),
           dim3(kAddColumns, kAddRows), context.stream, plan.image_groups, weights,
           shape.out_channels, static_cast<const float*>(partial), dw, db);
}

}  // namespace gyre::SIMT_NAMESPACE::direct
