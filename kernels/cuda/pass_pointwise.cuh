// Steps of the pass kernel without products: the image, dropout, ReLU, max-pooling, and the loss.
#pragma once

#include "kernels/cuda/dropout.cuh"
#include "kernels/cuda/pass_common.cuh"

namespace gyre::SIMT_NAMESPACE {

// x[c][h][w] = pixels[sample][c][h][w] * scale[c] + shift[c]
__device__ __forceinline__ void gather_image(const PassProgram& program, const GatherArgs& images,
                                             std::int64_t sample, float* shared) {
    const Planes& x = program.values[0];
    const std::uint8_t* pixels = images.pixels + sample * x.elems;
    const int step = program.quads ? 4 : 1;
    for (int i = pass_thread() * step; i < x.elems; i += kPassBlock * step) {
        const Element at = element(x, i);
        const float scale = images.scale[at.c], shift = images.shift[at.c];
        float* to = shared + place(x, at);
        if (program.quads) {
            const uchar4 p = *reinterpret_cast<const uchar4*>(pixels + i);
            to[0] = p.x * scale + shift;
            to[1] = p.y * scale + shift;
            to[2] = p.z * scale + shift;
            to[3] = p.w * scale + shift;
        } else {
            *to = pixels[i] * scale + shift;
        }
    }
}

// factors[word]; one thread per group of four words.
__device__ __forceinline__ void draw_factors(const PassDropout& d, const PassArgs& args,
                                             std::uint32_t sample, float* shared) {
    for (int group = pass_thread(); group * 4 < d.words; group += kPassBlock) {
        const RandomStream stream{args.seed, RandomPurpose::dropout, d.stream,
                                  args.epoch == nullptr ? 0 : *args.epoch};
        store4(shared + d.factors + group * 4,
               dropout_factors(stream, sample, static_cast<std::uint32_t>(group), d.largest_dropped,
                               d.keep));
    }
}

// y = x * factor
__device__ __forceinline__ void dropout_forward(const PassDropout& d, const Planes& x,
                                                const Planes& y, float* shared) {
    for (int i = pass_thread(); i < y.elems; i += kPassBlock) {
        shared[place(y, i)] = shared[place(x, i)] * shared[d.factors + divide(i, d.by_word)];
    }
    __syncthreads();
}
// dx = dy * factor
__device__ __forceinline__ void dropout_backward(const PassDropout& d, int elems, int dy, int dx,
                                                 float* shared) {
    for (int i = pass_thread(); i < elems; i += kPassBlock) {
        shared[dx + i] = shared[dy + i] * shared[d.factors + divide(i, d.by_word)];
    }
    __syncthreads();
}

// y = max(x, 0); NaN stays NaN
__device__ __forceinline__ void relu_forward(const Planes& x, const Planes& y, float* shared) {
    for (int i = pass_thread(); i < y.elems; i += kPassBlock) {
        const float v = shared[place(x, i)];
        shared[place(y, i)] = rectify(v, v);
    }
    __syncthreads();
}
// dx = y <= 0 ? 0 : dy
__device__ __forceinline__ void relu_backward(const Planes& y, int dy, int dx, float* shared) {
    for (int i = pass_thread(); i < y.elems; i += kPassBlock) {
        shared[dx + i] = rectify(shared[dy + i], shared[place(y, i)]);
    }
    __syncthreads();
}

// Max of output `e`'s window, the first of equals; NaN propagates. value(h, w) reads the source.
template <typename Value>
__device__ __forceinline__ float largest(const Windows& windows, const Element& e, Value value,
                                         int& where) {
    const int top = e.h * windows.stride, left = e.w * windows.stride;
    float best = 0.0f;
    where = -1;
    for (int h = top; h < top + windows.kernel; ++h) {
        for (int w = left; w < left + windows.kernel; ++w) {
            const float v = value(h, w);
            if (where < 0 || v > best || v != v) {
                best = v;
                where = h << 16 | w;
            }
        }
    }
    return best;
}

// The gradient of the source's element `e`: the sum of dy over the windows whose maximum it is, by
// row and column. y: the layout of the windows' outputs.
__device__ __forceinline__ float from_windows(const Windows& windows, const Planes& y, int dy,
                                              const Element& e, const float* shared) {
    const auto* where = reinterpret_cast<const std::int32_t*>(shared + windows.where);
    const int last_h = divide(e.h, windows.by_stride), last_w = divide(e.w, windows.by_stride);
    const int reach = divide(windows.kernel - 1, windows.by_stride);
    float sum = 0.0f;
    for (int h = max(last_h - reach, 0); h <= min(last_h, y.height - 1); ++h) {
        for (int w = max(last_w - reach, 0); w <= min(last_w, y.width - 1); ++w) {
            const int i = (e.c * y.height + h) * y.width + w;
            sum += where[i] == (e.h << 16 | e.w) ? shared[dy + i] : 0.0f;
        }
    }
    return sum;
}

// y[c][oh][ow] = max over the window
__device__ __forceinline__ void maxpool_forward(const Windows& windows, const Planes& x,
                                                const Planes& y, float* shared) {
    for (int i = pass_thread(); i < y.elems; i += kPassBlock) {
        const Element e = element(y, i);
        int where = 0;
        const float best = largest(
            windows, e,
            [&](int h, int w) {
                return shared[place(x, Element{e.c, h, w})];
            },
            where);
        shared[place(y, e)] = best;
        reinterpret_cast<std::int32_t*>(shared + windows.where)[i] = where;
    }
    __syncthreads();
}
__device__ __forceinline__ void maxpool_backward(const Windows& windows, const Planes& x,
                                                 const Planes& y, int dy, int dx, float* shared) {
    for (int i = pass_thread(); i < x.elems; i += kPassBlock) {
        shared[dx + i] = from_windows(windows, y, dy, element(x, i), shared);
    }
    __syncthreads();
}

// Computed by one warp from the image's logits, with their maximum m:
//   loss = log(sum over k of exp(logit_k - m)) + m - logit_label
//   dy_k = scale * (exp(logit_k - m) / sum - (k == label))
// Adds to loss and correct, which are the same on every lane.
__device__ __forceinline__ void cross_entropy_of_image(int classes, int logits, int dy, int label,
                                                       float scale, float* shared, double& loss,
                                                       double& correct) {
    const int lane = pass_thread() % 32;
    // NaN is never the largest, but it makes sum, loss and gradient NaN.
    float most = -INFINITY;
    int best = lane;
    for (int k = lane; k < classes; k += 32) {
        const float v = shared[logits + k];
        if (v > most) {
            most = v;
            best = k;
        }
    }
    warp_argmax(most, best);
    float sum = 0.0f;
    for (int k = lane; k < classes; k += 32) {
        sum += expf(shared[logits + k] - most);
    }
    sum = warp_sum(sum);
    loss += static_cast<double>(logf(sum) + most - shared[logits + label]);
    correct += best == label ? 1.0 : 0.0;
    const float factor = scale / sum;
    for (int k = lane; k < classes; k += 32) {
        shared[dy + k] = expf(shared[logits + k] - most) * factor - (k == label ? scale : 0.0f);
    }
}

}  // namespace gyre::SIMT_NAMESPACE
