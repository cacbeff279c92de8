// Linear layers of the pass kernel, for one image in shared memory. Weights are read by rows from
// the L2 cache, 16 bytes per thread, or from shared memory if they are few.
//   y[o] = b[o] + sum over i of w[o][i] x[i], with a ReLU if fused
//   dx[i] = sum over o of w[o][i] d[o], d = dy where y > 0
// dw = d^T x over the images is left to the reduce kernel, which receives x and d as "factors".
#pragma once

#include "kernels/cuda/pass_common.cuh"

namespace gyre::SIMT_NAMESPACE {

// Reads kWide (4 or 1) floats at `from`.
template <int kWide>
__device__ __forceinline__ void read_wide(const float* from, float* values) {
    if constexpr (kWide == 4) {
        read4(from, values);
    } else {
        *values = *from;
    }
}

__device__ __forceinline__ void linear_begin(const PassLinear& linear, const float* params,
                                             float* shared) {
    for (int o = pass_thread(); o < linear.out; o += kPassBlock) {
        shared[linear.biases + o] = params[linear.bias + o];
    }
    for (int i = pass_thread(); linear.kept >= 0 && i < linear.out * linear.in; i += kPassBlock) {
        shared[linear.kept + i] = params[linear.weight + i];
    }
}
__device__ __forceinline__ const float* linear_weights(const PassLinear& linear,
                                                       const float* params, const float* shared) {
    return linear.kept >= 0 ? shared + linear.kept : params + linear.weight;
}

// One warp per four outputs; its lanes divide the inputs.
template <int kWide>
__device__ __forceinline__ void linear_outputs(const PassLinear& linear, int x, const Planes& y,
                                               const float* params, float* shared) {
    constexpr int kOuts = 4;
    const float* const weights = linear_weights(linear, params, shared);
    const int lane = pass_thread() % 32;
    for (int first = pass_thread() / 32 * kOuts; first < linear.out; first += kPassWarps * kOuts) {
        const float* row[kOuts];
        SIMT_UNROLL
        for (int k = 0; k < kOuts; ++k) {
            row[k] = weights + std::int64_t{min(first + k, linear.out - 1)} * linear.in;
        }
        float sum[kOuts] = {};
        for (int i = lane * kWide; i < linear.in; i += 32 * kWide) {
            float in[kWide];
            read_wide<kWide>(shared + x + i, in);
            SIMT_UNROLL
            for (int k = 0; k < kOuts; ++k) {
                float weight[kWide];
                read_wide<kWide>(row[k] + i, weight);
                SIMT_UNROLL
                for (int e = 0; e < kWide; ++e) {
                    sum[k] += weight[e] * in[e];
                }
            }
        }
        SIMT_UNROLL
        for (int k = 0; k < kOuts; ++k) {
            const float total = warp_sum(sum[k]);
            if (lane == k && first + k < linear.out) {
                const float v = total + shared[linear.biases + first + k];
                shared[y.begin + first + k] = linear.relu ? rectify(v, v) : v;
            }
        }
    }
}

__device__ __forceinline__ void linear_forward(const PassLinear& linear, const Planes& x,
                                               const Planes& y, const float* params,
                                               float* shared) {
    if (linear.in % 4 == 0) {
        linear_outputs<4>(linear, x.begin, y, params, shared);
    } else {
        linear_outputs<1>(linear, x.begin, y, params, shared);
    }
    __syncthreads();
}

// dx summed over a part of the outputs; neighbouring threads have neighbouring inputs.
template <int kWide>
__device__ __forceinline__ void linear_input_sums(const PassLinear& linear, int dy,
                                                  const float* params, float* shared) {
    const int quads = linear.in / kWide;
    for (int item = pass_thread(); item < quads * linear.splits; item += kPassBlock) {
        const int split = divide(item, linear.by_quads), i = (item - split * quads) * kWide;
        const int first = split * linear.split_outs;
        const int last = min(first + linear.split_outs, linear.out);
        const float* weights =
            linear_weights(linear, params, shared) + std::int64_t{first} * linear.in + i;
        float sum[kWide] = {};
        SIMT_UNROLL_BY_4
        for (int o = first; o < last; ++o) {
            const float d = shared[dy + o];
            float weight[kWide];
            read_wide<kWide>(weights, weight);
            weights += linear.in;
            SIMT_UNROLL
            for (int e = 0; e < kWide; ++e) {
                sum[e] += weight[e] * d;
            }
        }
        float* to = shared + linear.sums + split * linear.in + i;
        if constexpr (kWide == 4) {
            store4(to, make_float4(sum[0], sum[1], sum[2], sum[3]));
        } else {
            *to = sum[0];
        }
    }
}

// dx < 0: not needed.
__device__ __forceinline__ void linear_backward(const PassLinear& linear, const Planes& x,
                                                const Planes& y, int dy, int dx,
                                                const float* params, float* factors, int image,
                                                float* shared) {
    float* x_factor = factors + linear.x_factor + std::int64_t{image} * linear.in;
    float* dy_factor = factors + linear.dy_factor + std::int64_t{image} * linear.out;
    for (int i = pass_thread(); i < linear.in; i += kPassBlock) {
        x_factor[i] = shared[x.begin + i];
    }
    for (int o = pass_thread(); o < linear.out; o += kPassBlock) {
        float d = shared[dy + o];
        if (linear.relu) {
            d = rectify(d, shared[y.begin + o]);
            shared[dy + o] = d;
        }
        dy_factor[o] = d;
    }
    if (dx < 0) {
        return;
    }
    if (linear.relu) {
        __syncthreads();
    }
    if (linear.in % 4 == 0) {
        linear_input_sums<4>(linear, dy, params, shared);
    } else {
        linear_input_sums<1>(linear, dy, params, shared);
    }
    __syncthreads();
    for (int i = pass_thread(); i < linear.in; i += kPassBlock) {
        float sum = 0.0f;
        for (int split = 0; split < linear.splits; ++split) {
            sum += shared[linear.sums + split * linear.in + i];
        }
        shared[dx + i] = sum;
    }
    __syncthreads();
}

}  // namespace gyre::SIMT_NAMESPACE
