// Weight gradients of convolutions in the pass kernel, for one image in shared memory (formulas:
// pass_conv.cuh): dy is spread over the convolution's output, and all terms are summed, also those
// of its zeros, 200 multiply-adds per 52 words of shared memory. With 2 x 2 windows a sum over the
// windows' maxima alone has a quarter of the multiply-adds and more instructions: on an H100 it was
// slower (docs/gpu-step.md, 5).
#pragma once

#include "kernels/cuda/pass_pointwise.cuh"

namespace gyre::SIMT_NAMESPACE {

template <int kKernel>
__device__ __forceinline__ void write_sums(const WeightSums& s, int split, int group, int pair,
                                           const float (&sum)[kWeightOuts][kKernel],
                                           const float (&bias)[kWeightOuts], float* shared) {
    float* to = shared + s.sums + split * s.sums_pitch;
    SIMT_UNROLL
    for (int o = 0; o < kWeightOuts; ++o) {
        const int out = group * kWeightOuts + o;
        SIMT_UNROLL
        for (int kw = 0; kw < kKernel; ++kw) {
            if (pair < s.pairs && out < s.outs) {
                to[out * s.taps + pair * kKernel + kw] = sum[o][kw];
            }
        }
        if (pair == 0 && out < s.outs) {
            to[s.outs * s.taps + out] = bias[o];
        }
    }
}

// Spreads dy; ends with a barrier. If windows do not overlap, `where` gives each one's maximum;
// otherwise each element looks at the windows that contain it.
__device__ __forceinline__ void spread_gradient(const Windows& windows, const SpreadPlanes& to,
                                                const Planes& y, int dy, float* shared) {
    if (windows.stride >= windows.kernel) {
        const float4 zeros = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        for (int i = pass_thread() * 4; i < to.elems; i += kPassBlock * 4) {
            store4(shared + to.begin + i, zeros);
        }
        __syncthreads();
        const auto* where = reinterpret_cast<const std::int32_t*>(shared + windows.where);
        for (int i = pass_thread(); i < y.elems; i += kPassBlock) {
            const int channel = divide(i, y.by_plane), at = where[i];
            const int h = (at >> 16) + to.padding, w = (at & 0xffff) + to.padding;
            shared[to.begin + channel * to.plane + h * to.pitch + w] = shared[dy + i];
        }
    } else {
        for (int i = pass_thread(); i < to.elems; i += kPassBlock) {
            const int channel = divide(i, to.by_plane);
            const int in_plane = i - channel * to.plane;
            const int row = divide(in_plane, to.by_pitch);
            const int h = row - to.padding, w = in_plane - row * to.pitch - to.padding;
            const bool inside = h >= 0 && h < windows.height && w >= 0 && w < windows.width;
            shared[to.begin + i] =
                inside ? from_windows(windows, y, dy, Element{channel, h, w}, shared) : 0.0f;
        }
    }
    __syncthreads();
}

// dw and db over some rows of dy, spread, for one row of the kernel; neighbouring threads have
// neighbouring rows of dy.
template <int kKernel>
__device__ __forceinline__ void weight_item(const PassConv& conv, int item, float* shared) {
    constexpr int kReach = kKernel > 1 ? 4 : 0;
    const WeightSums& s = conv.weights;
    const Correlation& c = conv.forward;
    const int by_split = divide(item, s.by_splits), split = item - by_split * s.splits;
    const int group = divide(by_split, s.by_pairs), pair = by_split - group * s.pairs;
    const int first_row = split * s.split_rows;
    const int last_row = min(first_row + s.split_rows, s.height);
    const float* x =
        shared + c.x + pair / kKernel * c.x_plane + (first_row + pair % kKernel) * c.x_pitch;
    const float* dy = shared + s.dy.begin + first_row * s.dy.pitch;
    float sum[kWeightOuts][kKernel] = {};
    float bias[kWeightOuts] = {};
    for (int row = first_row; row < last_row; ++row) {
        for (int tile = 0; tile < s.columns * kTilePixels; tile += kTilePixels) {
            float pixel[kTilePixels + kReach];
            SIMT_UNROLL
            for (int p = 0; p < kTilePixels + kReach; p += 4) {
                read4(x + tile + p, pixel + p);
            }
            SIMT_UNROLL
            for (int o = 0; o < kWeightOuts; ++o) {
                float d[kTilePixels];
                const float* from =
                    dy + min(group * kWeightOuts + o, s.outs - 1) * s.dy.plane + tile;
                read4(from, d);
                read4(from + 4, d + 4);
                SIMT_UNROLL
                for (int p = 0; p < kTilePixels; ++p) {
                    SIMT_UNROLL
                    for (int kw = 0; kw < kKernel; ++kw) {
                        sum[o][kw] += d[p] * pixel[p + kw];
                    }
                }
                if (pair == 0) {
                    bias[o] += ((d[0] + d[1]) + (d[2] + d[3])) + ((d[4] + d[5]) + (d[6] + d[7]));
                }
            }
        }
        x += c.x_pitch;
        dy += s.dy.pitch;
    }
    write_sums<kKernel>(s, split, group, pair, sum, bias, shared);
}

// Stores the image's dw and db in the block's partial, or adds them to it; ends with a barrier.
__device__ __forceinline__ void conv_weights(const PassConv& conv, const Planes& y, int dy,
                                             float* partial, bool add, float* shared) {
    const WeightSums& s = conv.weights;
    const int kernel = conv.forward.kernel;
    spread_gradient(conv.windows, s.dy, y, dy, shared);
    for (int item = pass_thread(); item < s.items; item += kPassBlock) {
        if (kernel == 5) {
            weight_item<5>(conv, item, shared);
        } else if (kernel == 3) {
            weight_item<3>(conv, item, shared);
        } else {
            weight_item<1>(conv, item, shared);
        }
    }
    __syncthreads();
    for (int i = pass_thread(); i < s.outs * (s.taps + 1); i += kPassBlock) {
        float sum = 0.0f;
        SIMT_UNROLL_BY_4
        for (int split = 0; split < s.splits; ++split) {
            sum += shared[s.sums + split * s.sums_pitch + i];
        }
        partial[i] = add ? partial[i] + sum : sum;
    }
    __syncthreads();
}

}  // namespace gyre::SIMT_NAMESPACE
