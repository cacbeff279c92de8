// Direct convolution, for stride 1, kernels of 1, 3 or 5 and few channels, if an image's whole
// input and all weights that a block needs fit in shared memory. The weight gradient is in
// conv2d_direct_weights.cu.
//
//   y[i][o][h][w] = b[o] + sum over c, kh, kw of w[o][c][kh][kw] x[i][c][h+kh-p][w+kw-p]
// The input gradient is the same sum over dy, with the kernel rotated by 180 degrees, input and
// output channels exchanged, and padding K-1-p.
//
// Block: as many threads as there is work for, up to 384; grid (groups of images, groups of output
// channels). A block keeps the padded inputs of its images and the weights of its channels,
// [tap][channel], in shared memory. A thread computes 4 adjacent pixels of a row for kOut channels:
// for each input row under the kernel it reads 8 pixels (two 16-byte accesses), then for each of K
// taps its channels' weights (the same for most of its warp) for 4 kOut multiply-adds. If that
// leaves threads idle, the input channels are divided among several, whose sums are added in shared
// memory, in order. FLOPs 2 n O C K K OH OW; bytes 4 n (C H W + O OH OW), each pixel and output
// once per group of output channels.
#include "kernels/cuda/conv2d_direct.cuh"

namespace gyre::SIMT_NAMESPACE::direct {
namespace {

constexpr int kForwardBlock = 384;  // threads, at most
constexpr int kWeightElems = 5120;  // of shared memory, 20 KiB

// The pitch of a tap's weights for `channels` output channels, 4 (mod 8), so that four channels by
// eight taps map to different banks.
constexpr int weight_pitch(int channels) {
    return (channels + 3) / 8 * 8 + 4;
}

// Channels per thread: two, four or eight.
int thread_channels(int out_channels) {
    return out_channels % 8 == 0 ? 8 : out_channels % 4 == 0 ? 4 : 2;
}

bool fits(const Window& window, int kernel) {
    const int taps = window.channels * kernel * kernel;
    // Beyond this, a matrix product reuses more data than a direct sum.
    return taps <= 500 && window.input_elems() <= kInputElems &&
           taps * weight_pitch(thread_channels(window.out_channels)) <= kWeightElems;
}

// The position of the weight of (output channel, input channel, tap).
struct WeightLayout {
    int out_stride, in_stride;
    bool turned;  // rotated by 180 degrees
};

struct ForwardPlan {
    Window window;
    WeightLayout layout;
    int images;        // per block
    int out_channels;  // per block, a multiple of kOut
    int weight_pitch;  // of a tap's weights in shared memory
    int splits;        // threads that share the input channels of an item
};

// Reads the weights of a block's output channels into `to` [channel][tap][output channel], for four
// output channels and eight adjacent taps at a time.
template <int kTaps>
__device__ __forceinline__ void read_weights(const ForwardPlan& plan, int first_out, const float* w,
                                             float* to) {
    const int taps = plan.window.channels * kTaps;
    const int first = static_cast<int>(threadIdx.x) / 4, step = static_cast<int>(blockDim.x) / 4;
    for (int out = static_cast<int>(threadIdx.x) % 4; out < plan.out_channels; out += 4) {
        const bool inside = first_out + out < plan.window.out_channels;
        for (int at = first; at < taps; at += step) {
            const int in = at / kTaps, tap = at % kTaps;
            const int from = (first_out + out) * plan.layout.out_stride +
                             in * plan.layout.in_stride +
                             (plan.layout.turned ? kTaps - 1 - tap : tap);
            to[at * plan.weight_pitch + out] = inside ? w[from] : 0.0f;
        }
    }
}

template <int kOut>
__device__ __forceinline__ void read_taps(const float* from, float (&weight)[kOut]) {
    if constexpr (kOut == 2) {
        const auto two = load_vector<float2>(from);
        weight[0] = two.x;
        weight[1] = two.y;
    } else {
        SIMT_UNROLL
        for (int o = 0; o < kOut; o += 4) {
            read4(from + o, weight + o);
        }
    }
}

// An item of work: 4 adjacent pixels of a row of an image, for kOut output channels.
struct ForwardItem {
    int quad, row, group, image;
};

// Adds the products over input channels [first, last).
template <int kKernel, int kOut>
__device__ __forceinline__ void add_channels(const ForwardPlan& plan, const ForwardItem& item,
                                             int first, int last, const float* input,
                                             const float* weights, float (&sum)[kOut][kPixels]) {
    constexpr int kTaps = kKernel * kKernel;
    const Window& window = plan.window;
    const int rows = window.height + 2 * window.padding;
    for (int in = first; in < last; ++in) {
        SIMT_UNROLL
        for (int kh = 0; kh < kKernel; ++kh) {
            const float* from =
                input +
                ((item.image * window.channels + in) * rows + item.row + kh) * window.pitch +
                item.quad * kPixels;
            float pixel[2 * kPixels];
            read_pixels<kKernel>(from, pixel);
            const float* tap =
                weights + (in * kTaps + kh * kKernel) * plan.weight_pitch + item.group * kOut;
            SIMT_UNROLL
            for (int kw = 0; kw < kKernel; ++kw) {
                float weight[kOut];
                read_taps<kOut>(tap + kw * plan.weight_pitch, weight);
                SIMT_UNROLL
                for (int o = 0; o < kOut; ++o) {
                    SIMT_UNROLL
                    for (int p = 0; p < kPixels; ++p) {
                        sum[o][p] += weight[o] * pixel[kw + p];
                    }
                }
            }
        }
    }
}

template <int kOut>
__device__ __forceinline__ void store_outputs(const ForwardPlan& plan, const ForwardItem& item,
                                              std::int64_t first_image, int first_out,
                                              const float (&sum)[kOut][kPixels], const float* b,
                                              float* y) {
    const Window& window = plan.window;
    SIMT_UNROLL
    for (int o = 0; o < kOut; ++o) {
        const int out = first_out + item.group * kOut + o;
        if (out >= window.out_channels) {
            break;
        }
        const float bias = b == nullptr ? 0.0f : b[out];
        float* to = y +
                    (((first_image + item.image) * window.out_channels + out) * window.out_height +
                     item.row) *
                        window.out_width +
                    item.quad * kPixels;
        if (window.out_width % kPixels == 0) {
            store4(to, make_float4(sum[o][0] + bias, sum[o][1] + bias, sum[o][2] + bias,
                                   sum[o][3] + bias));
            continue;
        }
        SIMT_UNROLL
        for (int p = 0; p < kPixels; ++p) {
            if (item.quad * kPixels + p < window.out_width) {
                to[p] = sum[o][p] + bias;
            }
        }
    }
}

template <int kKernel, int kOut>
__global__ void __launch_bounds__(kForwardBlock)
    direct_forward_kernel(ForwardPlan plan, int n, const float* x, const float* w, const float* b,
                          float* y) {
    SIMT_SHARED(float, input, [kInputElems]);
    SIMT_SHARED(float, weights, [kWeightElems]);
    const Window& window = plan.window;
    const int first_image = static_cast<int>(blockIdx.x) * plan.images;
    const int images = min(plan.images, n - first_image);
    const int first_out = static_cast<int>(blockIdx.y) * plan.out_channels;

    read_padded(window, x, first_image, images, input);
    read_weights<kKernel * kKernel>(plan, first_out, w, weights);
    __syncthreads();

    const int quads = (window.out_width + kPixels - 1) / kPixels;
    const int groups = plan.out_channels / kOut;
    const int items = images * groups * window.out_height * quads;
    const auto item_of = [&](int i) {
        const int row = i / quads, group = row / window.out_height, image = group / groups;
        return ForwardItem{i - row * quads, row - group * window.out_height, group - image * groups,
                           image};
    };
    const int thread = static_cast<int>(threadIdx.x);
    if (plan.splits == 1) {
        for (int i = thread; i < items; i += static_cast<int>(blockDim.x)) {
            const ForwardItem item = item_of(i);
            float sum[kOut][kPixels] = {};
            add_channels<kKernel>(plan, item, 0, window.channels, input, weights, sum);
            store_outputs(plan, item, first_image, first_out, sum, b, y);
        }
        return;
    }
    // The threads process all items at once; the last threads have none.
    const int split = thread / items, i = thread - split * items;
    const int channels = (window.channels + plan.splits - 1) / plan.splits;
    const ForwardItem item = item_of(i);
    float sum[kOut][kPixels] = {};
    if (split < plan.splits) {
        add_channels<kKernel>(plan, item, split * channels,
                              min((split + 1) * channels, window.channels), input, weights, sum);
    }
    __syncthreads();  // before the sums of the other splits overwrite the input
    if (split > 0 && split < plan.splits) {
        SIMT_UNROLL
        for (int o = 0; o < kOut; ++o) {
            store4(input + (((split - 1) * kOut + o) * items + i) * kPixels,
                   make_float4(sum[o][0], sum[o][1], sum[o][2], sum[o][3]));
        }
    }
    __syncthreads();
    if (split > 0) {
        return;
    }
    for (int other = 1; other < plan.splits; ++other) {
        SIMT_UNROLL
        for (int o = 0; o < kOut; ++o) {
            float add[kPixels];
            read4(input + (((other - 1) * kOut + o) * items + i) * kPixels, add);
            SIMT_UNROLL
            for (int p = 0; p < kPixels; ++p) {
                sum[o][p] += add[p];
            }
        }
    }
    store_outputs(plan, item, first_image, first_out, sum, b, y);
}

// The number of threads that share an item's input channels: enough to keep a block busy. It
// depends only on shapes, as it determines the order of summation. items: per image.
int splits_of(const Window& window, int items, int out) {
    if (window.channels < 2 || items <= 0) {
        return 1;
    }
    const int room = kInputElems / (items * out * kPixels) + 1;
    const int most = std::min({kForwardBlock / items, room, window.channels, 8});
    if (most < 2) {
        return 1;
    }
    const int each = (window.channels + most - 1) / most;
    return (window.channels + each - 1) / each;
}

template <int kKernel, int kOut>
void run_forward(const Context& context, const char* name, ForwardPlan plan, int n, const float* x,
                 const float* w, const float* b, float* y) {
    const Window& window = plan.window;
    const int taps = window.channels * kKernel * kKernel;
    const int quads = (window.out_width + kPixels - 1) / kPixels;
    const int all_groups = round_up(window.out_channels, kOut) / kOut;
    // Each block computes as many output channels as its shared memory holds weights for, but an
    // image is split over at least three blocks if it has enough channels.
    int groups = std::min(all_groups, std::max(1, (all_groups + 2) / 3));
    while (groups > 1 && taps * weight_pitch(groups * kOut) > kWeightElems) {
        --groups;
    }
    const int items = groups * window.out_height * quads;
    plan.splits = splits_of(window, items, kOut);
    // First enough blocks for the GPU, then as many images as fit, so weights are read less often.
    const int blocks_wanted = std::max(1, context.multiprocessors * 4 * groups / all_groups);
    plan.images = plan.splits > 1 ? 1
                                  : std::clamp((n + blocks_wanted - 1) / blocks_wanted, 1,
                                               kInputElems / window.input_elems());
    plan.out_channels = groups * kOut;
    plan.weight_pitch = weight_pitch(plan.out_channels);
    const int work = items * plan.splits * plan.images;
    const int rounds = (work + kForwardBlock - 1) / kForwardBlock;
    const int threads = std::max(64, round_up((work + rounds - 1) / rounds, 32));
    launch(name, direct_forward_kernel<kKernel, kOut>,
           dim3(static_cast<unsigned>((n + plan.images - 1) / plan.images),
                static_cast<unsigned>((all_groups + groups - 1) / groups)),
           dim3(static_cast<unsigned>(threads)), context.stream, plan, n, x, w, b, y);
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

}  // namespace

bool can_forward(const Conv2dShape& shape) {
    return suits(shape) && fits(forward_window(shape), shape.kernel);
}

bool can_backward_data(const Conv2dShape& shape) {
    return suits(shape) && fits(backward_window(shape), shape.kernel);
}

void forward(const Context& context, const Conv2dShape& shape, int n, const float* x,
             const float* w, const float* b, float* y) {
    const int taps = shape.kernel * shape.kernel;
    run_forward(context, "conv2d_forward", shape.kernel,
                {forward_window(shape), {shape.in.channels * taps, taps, false}, 0, 0, 0, 0}, n, x,
                w, b, y);
}

void backward_data(const Context& context, const Conv2dShape& shape, int n, const float* dy,
                   const float* w, float* dx) {
    const int taps = shape.kernel * shape.kernel;
    run_forward(context, "conv2d_backward_data", shape.kernel,
                {backward_window(shape), {taps, shape.in.channels * taps, true}, 0, 0, 0, 0}, n, dy,
                w, nullptr, dx);
}

}  // namespace gyre::SIMT_NAMESPACE::direct
