// The weight gradient of the direct convolutions (conv2d_direct.cu).
//
//   dw[o][c][kh][kw] = sum over i, h, w of dy[i][o][h][w] x[i][c][h+kh-p][w+kw-p]
//   db[o] = sum of dy[i][o]
//
// Block: up to 256 threads; grid (groups of images, groups of output channels). A thread sums for
// two output channels, one input channel, one kernel row and some rows of dy, over the images of
// its block. The rows are added in shared memory, in order, and written as the block's partial
// gradient [group of images][O C K K, then O]; a second kernel adds the groups in order.
// FLOPs 2 n O C K K OH OW; bytes 4 n (C H W + O OH OW), plus 8 O (C K K + 1) per group of images.
#include "kernels/cuda/add_parts.cuh"
#include "kernels/cuda/conv2d_direct.cuh"

namespace gyre::SIMT_NAMESPACE::direct {
namespace {

constexpr int kGradientElems = 6144;  // of shared memory, 24 KiB

struct WeightsPlan {
    Window window;
    int dy_pitch;      // of a row of dy in shared memory: a multiple of kPixels
    int out_channels;  // per block, even
    int strips;        // of rows of dy, distributed over threads
    int strip_rows;    // rows per strip; the last may have fewer
    int threads;       // per block
    int image_groups;
};

constexpr int kPair = 2;  // output channels per thread

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

// The sums that a thread computes.
struct WeightsItem {
    int kh, in, pair, strip;
};
__host__ __device__ __forceinline__ WeightsItem weights_item(int item, int kernel, int channels,
                                                             int pairs) {
    return {item % kernel, item / kernel % channels, item / kernel / channels % pairs,
            item / kernel / channels / pairs};
}

// Reads an image's dy for `outs` output channels from first_out on, followed by zeros up to the
// number of channels per block.
__device__ __forceinline__ void read_gradients(const WeightsPlan& plan, const float* dy, int image,
                                               int first_out, int outs, float* gradient) {
    const Window& window = plan.window;
    read_planes({outs, window.out_height, window.out_width, window.out_height, 0, plan.dy_pitch},
                dy + (std::int64_t{image} * window.out_channels + first_out) * window.out_height *
                         window.out_width,
                plan.out_channels, gradient);
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

    // Neighbouring threads share strip and output channels, so that they read the same dy.
    const int item = static_cast<int>(threadIdx.x);
    const int pairs = plan.out_channels / kPair;
    const auto [kh, in, pair, strip] = weights_item(item, kKernel, window.channels, pairs);
    const bool active = strip < plan.strips;
    const int first_row = strip * plan.strip_rows;
    const int last_row = min(first_row + plan.strip_rows, window.out_height);

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
            SIMT_NO_UNROLL
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
        __syncthreads();  // before the next image overwrites this one
    }

    // The strips of a (pair, channel, row of the kernel) are `threads` apart.
    const int threads = pairs * window.channels * kKernel;
    const int taps = window.channels * kKernel * kKernel;
    const int group_elems = window.out_channels * (taps + 1);
    float* to = partial + std::int64_t{blockIdx.x} * group_elems;
    SIMT_UNROLL
    for (int o = 0; o < kPair; ++o) {
        // input[] has 5120 floats, so K + 1 values per thread fit at a time.
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

// The threads of a block's first row each write one gradient.
__global__ void add_groups_kernel(int groups, int weights, int outs, const float* partial,
                                  float* dw, float* db) {
    const float sum = sum_of_parts(groups, weights + outs, partial);
    const int elem = static_cast<int>(blockIdx.x * kAddColumns + threadIdx.x);
    if (threadIdx.y == 0 && elem < weights + outs) {
        (elem < weights ? dw[elem] : db[elem - weights]) = sum;
    }
}

WeightsPlan plan_weights(const Conv2dShape& shape, int n) {
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
    const int most_strips = std::min(kBlock / (pairs * pair_threads), window.out_height);
    plan.strip_rows = (window.out_height + most_strips - 1) / most_strips;
    plan.strips = (window.out_height + plan.strip_rows - 1) / plan.strip_rows;
    plan.threads = round_up(pairs * pair_threads * plan.strips, 32);
    const int out_groups = (all_pairs + pairs - 1) / pairs;
    plan.image_groups = std::clamp(kPlannedMultiprocessors * 4 / out_groups, 1, std::max(1, n));
    const int channel_rows = window.channels * window.rows();
    plan.window.pitch = best_pitch(
        least_pitch(shape.out()), kInputElems / std::max(1, channel_rows), [&](int i, int pitch) {
            const auto [kh, in, pair, strip] =
                weights_item(i, shape.kernel, window.channels, pairs);
            return (in * window.rows() + strip * plan.strip_rows + kh) * pitch;
        });
    return plan;
}

}  // namespace

bool can_backward_weights(const Conv2dShape& shape) {
    const Window window = forward_window(shape);
    return suits(shape) && window.input_elems() <= kInputElems &&
           window.channels * shape.kernel <= 128 &&
           kPair * window.out_height * round_up(window.out_width, kPixels) <= kGradientElems;
}

std::size_t workspace_bytes(const Conv2dShape& shape, int n) {
    if (!can_backward_weights(shape)) {
        return 0;
    }
    const std::int64_t group_elems = shape.weight_elems() + shape.out_channels;
    return static_cast<std::size_t>(plan_weights(shape, n).image_groups * group_elems) *
           sizeof(float);
}

void backward_weights(const Context& context, const Conv2dShape& shape, int n, const float* x,
                      const float* dy, float* dw, float* db) {
    const WeightsPlan plan = plan_weights(shape, n);
    const auto weights = static_cast<int>(shape.weight_elems());
    const int elems = weights + shape.out_channels;
    float* partial = context.workspace.floats(std::int64_t{plan.image_groups} * elems);
    const dim3 grid(
        static_cast<unsigned>(plan.image_groups),
        static_cast<unsigned>((shape.out_channels + plan.out_channels - 1) / plan.out_channels));
    const auto kernel = shape.kernel == 5   ? direct_weights_kernel<5>
                        : shape.kernel == 3 ? direct_weights_kernel<3>
                                            : direct_weights_kernel<1>;
    launch("conv2d_backward_weights", kernel, grid, dim3(static_cast<unsigned>(plan.threads)),
           context.stream, plan, n, x, dy, partial);
    launch("conv2d_backward_weights", add_groups_kernel, add_blocks(elems),
           dim3(kAddColumns, kAddRows), context.stream, plan.image_groups, weights,
           shape.out_channels, static_cast<const float*>(partial), dw, db);
}

}  // namespace gyre::SIMT_NAMESPACE::direct
