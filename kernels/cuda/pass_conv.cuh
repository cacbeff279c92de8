// Convolution blocks of the pass kernel: a convolution of stride 1 with the dropout2d, max-pooling
// and ReLU that follow it, for one image in shared memory.
//
//   a[o][h][w] = b[o] + sum over c, kh, kw of w[o][c][kh][kw] x[c][h + kh - p][w + kw - p]
//   y = max(max over the window of factor[o] a, 0)
// Backward, with d = factor[o] dy where y > 0, which goes to one element (h_i, w_i) of the window:
//   dw[o][c][kh][kw] = sum over windows i of d[o][i] x[c][h_i + kh - p][w_i + kw - p],
//   db[o] = sum of d[o][i]
//   dx[c][h_i + kh - p][w_i + kw - p] += w[o][c][kh][kw] d[o][i], window by window if these are
//   2 x 2, else as the correlation of d, spread over the plane, with the rotated weights
//
// In a correlation, a thread computes 4 channels x 8 pixels of a row: for each input row under the
// kernel three 16-byte reads, for each tap one read of four weights, for 32 multiply-adds. If there
// are few tiles, input channels are split among threads, and the splits added in order.
#pragma once

#include "kernels/cuda/pass_weights.cuh"

namespace gyre::SIMT_NAMESPACE {

template <int kKernel>
__device__ __forceinline__ void correlate_item(const Correlation& c, int item, float* shared) {
    constexpr int kTaps = kKernel * kKernel, kReach = kKernel > 1 ? 4 : 0;
    // Neighbouring threads have neighbouring rows, so that they share weights.
    const int by_row = divide(item, c.by_height), row = item - by_row * c.height;
    const int by_column = divide(by_row, c.by_columns), column = by_row - by_column * c.columns;
    const int split = divide(by_column, c.by_groups), group = by_column - split * c.groups;
    const int first = split * c.split_channels;
    const float* x = shared + c.x + first * c.x_plane + row * c.x_pitch + column * kTilePixels;
    const float* w = shared + c.weights + first * kTaps * c.weights_pitch + group * kTileChannels;
    float sum[kTileChannels][kTilePixels] = {};
    for (int channel = min(c.split_channels, c.channels - first); channel > 0; --channel) {
        // The code of all rows together takes longer to fetch than to run.
        SIMT_NO_UNROLL
        for (int kh = 0; kh < kKernel; ++kh) {
            float pixel[kTilePixels + kReach];
            SIMT_UNROLL
            for (int p = 0; p < kTilePixels + kReach; p += 4) {
                read4(x + kh * c.x_pitch + p, pixel + p);
            }
            SIMT_UNROLL
            for (int kw = 0; kw < kKernel; ++kw) {
                float weight[kTileChannels];
                read4(w, weight);
                w += c.weights_pitch;
                SIMT_UNROLL
                for (int o = 0; o < kTileChannels; ++o) {
                    SIMT_UNROLL
                    for (int p = 0; p < kTilePixels; ++p) {
                        sum[o][p] += weight[o] * pixel[kw + p];
                    }
                }
            }
        }
        x += c.x_plane;
    }
    float* to = shared + c.sums + (split * c.groups + group) * kTileChannels * c.sums_plane +
                row * c.sums_pitch + column * kTilePixels;
    SIMT_UNROLL
    for (int o = 0; o < kTileChannels; ++o) {
        store4(to, make_float4(sum[o][0], sum[o][1], sum[o][2], sum[o][3]));
        store4(to + 4, make_float4(sum[o][4], sum[o][5], sum[o][6], sum[o][7]));
        to += c.sums_plane;
    }
}

// Stores the sums of all splits; ends with a barrier.
__device__ __forceinline__ void correlate(const Correlation& c, float* shared) {
    for (int item = pass_thread(); item < c.items; item += kPassBlock) {
        if (c.kernel == 5) {
            correlate_item<5>(c, item, shared);
        } else if (c.kernel == 3) {
            correlate_item<3>(c, item, shared);
        } else {
            correlate_item<1>(c, item, shared);
        }
    }
    __syncthreads();
}

__device__ __forceinline__ float add_splits(const Correlation& c, const Element& e,
                                            const float* shared) {
    const float* from = shared + c.sums + e.c * c.sums_plane + e.h * c.sums_pitch + e.w;
    float sum = 0.0f;
    SIMT_UNROLL_BY_4
    for (int split = 0; split < c.splits; ++split) {
        sum += from[split * c.groups * kTileChannels * c.sums_plane];
    }
    return sum;
}

// One thread per tap and four outputs; neighbouring threads have neighbouring taps.
__device__ __forceinline__ void read_weights(const CorrelationWeights& plan, const Correlation& c,
                                             const float* from, float* shared) {
    const int items = plan.taps * plan.ins * c.groups;
    for (int item = pass_thread(); item < items; item += kPassBlock) {
        const int by_tap = divide(item, plan.by_taps), tap = item - by_tap * plan.taps;
        const int group = divide(by_tap, plan.by_ins), in = by_tap - group * plan.ins;
        float weight[kTileChannels];
        SIMT_UNROLL
        for (int k = 0; k < kTileChannels; ++k) {
            const int out = group * kTileChannels + k;
            weight[k] =
                out < plan.outs ? from[in * plan.in_stride + out * plan.out_stride + tap] : 0.0f;
        }
        const int to_tap = plan.turned ? plan.taps - 1 - tap : tap;
        store4(shared + c.weights + (in * plan.taps + to_tap) * c.weights_pitch +
                   group * kTileChannels,
               make_float4(weight[0], weight[1], weight[2], weight[3]));
    }
}

// Loads data shared by all images of a block.
__device__ __forceinline__ void conv_begin(const PassConv& conv, const float* params,
                                           float* shared) {
    read_weights(conv.forward_weights, conv.forward, params + conv.weight, shared);
    for (int i = pass_thread(); i < conv.ways.words; i += kPassBlock) {
        reinterpret_cast<std::uint32_t*>(shared + conv.ways.begin)[i] = 0;
    }
    for (int o = pass_thread(); o < conv.weights.outs; o += kPassBlock) {
        shared[conv.biases + o] = params[conv.bias + o];
    }
}

// Max of output `e`'s 2 x 2 window, the first of equals; NaN propagates. way: lower * 2 + right.
__device__ __forceinline__ float largest_of_four(const Correlation& c, const Element& e, float bias,
                                                 float factor, const float* shared, int& way) {
    const float* from = shared + c.sums + e.c * c.sums_plane + 2 * e.h * c.sums_pitch + 2 * e.w;
    float sum[4] = {};
    SIMT_UNROLL_BY_4
    for (int split = 0; split < c.splits; ++split) {
        const auto upper = load_vector<float2>(from),
                   lower = load_vector<float2>(from + c.sums_pitch);
        sum[0] += upper.x;
        sum[1] += upper.y;
        sum[2] += lower.x;
        sum[3] += lower.y;
        from += c.groups * kTileChannels * c.sums_plane;
    }
    float best = 0.0f;
    SIMT_UNROLL
    for (int i = 0; i < 4; ++i) {
        const float v = (bias + sum[i]) * factor;
        if (i == 0 || v > best || v != v) {
            best = v;
            way = i;
        }
    }
    return best;
}

__device__ __forceinline__ void conv_forward(const PassConv& conv, const Planes& y, float* shared) {
    correlate(conv.forward, shared);
    for (int i = pass_thread(); i < y.elems; i += kPassBlock) {
        const Element e = element(y, i);
        const float bias = shared[conv.biases + e.c];
        const float factor = conv.dropout.words > 0 ? shared[conv.dropout.factors + e.c] : 1.0f;
        int where = 0;
        float best = 0.0f;
        if (conv.ways.pitch > 0) {
            int way = 0;
            best = largest_of_four(conv.forward, e, bias, factor, shared, way);
            where = (2 * e.h + way / 2) << 16 | (2 * e.w + way % 2);
            reinterpret_cast<std::uint8_t*>(
                shared + conv.ways.begin)[(e.c * y.height + e.h) * conv.ways.pitch + e.w] =
                static_cast<std::uint8_t>(way);
        } else {
            best = largest(
                conv.windows, e,
                [&](int h, int w) {
                    return (bias + add_splits(conv.forward, Element{e.c, h, w}, shared)) * factor;
                },
                where);
        }
        shared[place(y, e)] = conv.relu ? rectify(best, best) : best;
        reinterpret_cast<std::int32_t*>(shared + conv.windows.where)[i] = where;
    }
    __syncthreads();
}

// dx by a correlation of d, spread over the convolution's output and surrounded by zeros.
__device__ __forceinline__ void conv_input_gradient(const PassConv& conv, const Planes& x,
                                                    const Planes& y, int dy, int dx,
                                                    const float* params, float* shared) {
    const Correlation& c = conv.backward;
    read_weights(conv.backward_weights, c, params + conv.weight, shared);
    spread_gradient(conv.windows, conv.dy, y, dy, shared);
    correlate(c, shared);
    for (int i = pass_thread(); i < x.elems; i += kPassBlock) {
        shared[dx + i] = add_splits(c, element(x, i), shared);
    }
    __syncthreads();
}

// The ways of four consecutive windows, one byte each.
__device__ __forceinline__ std::uint32_t four_ways(const WindowWays& ways, const Planes& y, int out,
                                                   int row, int column, const float* shared) {
    return reinterpret_cast<const std::uint32_t*>(
        shared + ways.begin)[((out * y.height + row) * ways.pitch + column) / 4];
}

// sum[from + kw] += d * weight[kw][k]
template <int kKernel>
__device__ __forceinline__ void add_row(float d, const float (&weight)[kKernel][kTileChannels],
                                        int k, int from, float (&sum)[kSpreadPitch]) {
    SIMT_UNROLL
    for (int kw = 0; kw < kKernel; ++kw) {
        sum[from + kw] += d * weight[kw][k];
    }
}

// All lanes have the same windows, so that all take the same one of the four branches.
template <int kKernel>
__device__ __forceinline__ void spread_unit(const PassConv& conv, const Planes& y, int dy, int unit,
                                            float* shared) {
    const WindowSpread& s = conv.spread;
    const int by_chunk = unit / s.chunks, chunk = unit - by_chunk * s.chunks;
    const int row = by_chunk / s.columns, column = by_chunk - row * s.columns;
    const int pair = chunk * 32 + pass_thread() % 32;
    const Correlation& c = conv.forward;
    const float* w = shared + c.weights + min(pair, s.pairs - 1) * kKernel * c.weights_pitch;
    float sum[2][kSpreadPitch] = {};
    for (int group = 0; group < c.groups; ++group) {
        float weight[kKernel][kTileChannels];
        SIMT_UNROLL
        for (int kw = 0; kw < kKernel; ++kw) {
            read4(w + kw * c.weights_pitch + group * kTileChannels, weight[kw]);
        }
        SIMT_UNROLL
        for (int k = 0; k < kTileChannels; ++k) {
            const int out = group * kTileChannels + k;
            if (out < y.channels) {
                const int left = column * kSpreadWindows;
                const int first = (out * y.height + row) * y.width + left;
                const std::uint32_t ways = four_ways(conv.ways, y, out, row, left, shared);
                SIMT_UNROLL
                for (int v = 0; v < kSpreadWindows; ++v) {
                    if (left + v < y.width) {
                        const float d = shared[dy + first + v];
                        const bool lower = (ways >> 8 * v & 2) != 0;
                        const bool right = (ways >> 8 * v & 1) != 0;
                        if (lower && right) {
                            add_row<kKernel>(d, weight, k, 2 * v + 1, sum[1]);
                        } else if (lower) {
                            add_row<kKernel>(d, weight, k, 2 * v, sum[1]);
                        } else if (right) {
                            add_row<kKernel>(d, weight, k, 2 * v + 1, sum[0]);
                        } else {
                            add_row<kKernel>(d, weight, k, 2 * v, sum[0]);
                        }
                    }
                }
            }
        }
    }
    if (pair < s.pairs) {
        float* to = shared + s.sums + (by_chunk * s.pairs + pair) * kSpreadItem;
        SIMT_UNROLL
        for (int i = 0; i < 2 * kSpreadPitch; i += 4) {
            const float* from = &sum[i / kSpreadPitch][i % kSpreadPitch];
            store4(to + i, make_float4(from[0], from[1], from[2], from[3]));
        }
    }
}

// Sums over kernel rows and windows for input element (c, h, w), given in padded coordinates.
__device__ __forceinline__ float add_spread(const PassConv& conv, const Planes& y, const Element& e,
                                            const float* shared) {
    const WindowSpread& s = conv.spread;
    const int kernel = conv.forward.kernel;
    const int last = e.w / (2 * kSpreadWindows), at = e.w % (2 * kSpreadWindows);
    float sum = 0.0f;
    for (int kh = 0; kh < kernel; ++kh) {
        const int h = e.h - kh, row = h >> 1;
        if (h < 0 || row >= y.height) {
            continue;
        }
        const float* from = shared + s.sums + (h & 1) * kSpreadPitch + at +
                            ((row * s.columns + last) * s.pairs + e.c * kernel + kh) * kSpreadItem;
        if (last > 0 && at < kernel - 1) {
            sum += from[2 * kSpreadWindows - s.pairs * kSpreadItem];
        }
        if (last < s.columns) {
            sum += *from;
        }
    }
    return sum;
}

// dx by windows, each of which has one element with a gradient.
__device__ __forceinline__ void conv_spread_gradient(const PassConv& conv, const Planes& x,
                                                     const Planes& y, int dy, int dx,
                                                     float* shared) {
    const WindowSpread& s = conv.spread;
    const int kernel = conv.forward.kernel;
    const int units = y.height * s.columns * s.chunks;
    for (int unit = pass_thread() / 32; unit < units; unit += kPassWarps) {
        if (kernel == 5) {
            spread_unit<5>(conv, y, dy, unit, shared);
        } else if (kernel == 3) {
            spread_unit<3>(conv, y, dy, unit, shared);
        } else {
            spread_unit<1>(conv, y, dy, unit, shared);
        }
    }
    __syncthreads();
    const int padding = conv.padding;
    for (int i = pass_thread(); i < x.elems; i += kPassBlock) {
        const Element e = element(x, i);
        shared[dx + i] = add_spread(conv, y, Element{e.c, e.h + padding, e.w + padding}, shared);
    }
    __syncthreads();
}

// dx < 0: not needed.
__device__ __forceinline__ void conv_backward(const PassConv& conv, const Planes& x,
                                              const Planes& y, int dy, int dx, const float* params,
                                              float* partial, bool add, float* shared) {
    if (conv.relu || conv.dropout.words > 0) {
        for (int i = pass_thread(); i < y.elems; i += kPassBlock) {
            const Element e = element(y, i);
            const float d = shared[dy + i];
            const float factor = conv.dropout.words > 0 ? shared[conv.dropout.factors + e.c] : 1.0f;
            shared[dy + i] = (conv.relu ? rectify(d, shared[place(y, e)]) : d) * factor;
        }
        __syncthreads();
    }
    conv_weights(conv, y, dy, partial + conv.partial, add, shared);
    if (dx >= 0 && conv.spread.pairs > 0) {
        conv_spread_gradient(conv, x, y, dy, dx, shared);
    } else if (dx >= 0) {
        conv_input_gradient(conv, x, y, dy, dx, params, shared);
    }
}

}  // namespace gyre::SIMT_NAMESPACE
