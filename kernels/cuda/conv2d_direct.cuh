// Shared parts of the direct convolutions' forward pass (conv2d_direct.cu) and weight gradient
// (conv2d_direct_weights.cu): loading images into shared memory.
#pragma once

#include <algorithm>

#include "kernels/cuda/conv2d.cuh"
#include "kernels/cuda/elementwise.cuh"

namespace gyre::SIMT_NAMESPACE::direct {

constexpr int kBlock = 256;        // threads of the weight gradient, at most
constexpr int kPixels = 4;         // adjacent pixels of a row that a thread computes
constexpr int kInputElems = 5120;  // of shared memory, 20 KiB

inline int round_up(int value, int step) {
    return (value + step - 1) / step * step;
}

// A convolution as a sliding window, with the channels that a block works on.
struct Window {
    int channels, height, width;  // of the input
    int padding;
    int out_channels, out_height, out_width;
    int pitch;  // of an input row in shared memory: padding, pixels, and the reach of the last quad

    int rows() const { return height + 2 * padding; }
    int input_elems() const { return channels * rows() * pitch; }
};

// The pitch in [least, most], a multiple of 4, with the fewest bank conflicts if thread i of a
// block reads 4 floats at of_thread(i, pitch); the smallest such pitch.
template <typename Place>
int best_pitch(int least, int most, Place of_thread) {
    int best = least, fewest = 0;
    for (int pitch = least; pitch <= std::min(most, least + 28); pitch += 4) {
        int conflicts = 0;
        for (int first = 0; first < kBlock;
             first += 8) {  // a quarter of a warp is served at a time
            int quads[8] = {};
            for (int i = 0; i < 8; ++i) {
                quads[i] = of_thread(first + i, pitch) / 4;
                conflicts += std::any_of(quads, quads + i, [&](int other) {
                    return other != quads[i] && other % 8 == quads[i] % 8;
                });
            }
        }
        if (pitch == least || conflicts < fewest) {
            best = pitch;
            fewest = conflicts;
        }
    }
    return best;
}

inline int least_pitch(const Shape& out) {
    return round_up(out.width, kPixels) + kPixels;
}

inline Window make_window(const Shape& in, const Shape& out, int padding) {
    Window window{in.channels,  in.height,  in.width,  padding,
                  out.channels, out.height, out.width, least_pitch(out)};
    const int quads = (out.width + kPixels - 1) / kPixels;
    const int most = kInputElems / std::max(1, window.channels * window.rows());
    if (quads > 0 && out.height > 0) {
        window.pitch = best_pitch(
            window.pitch, std::max(most, window.pitch),
            [&](int i, int pitch) { return i / quads % out.height * pitch + i % quads * kPixels; });
    }
    return window;
}

inline Window forward_window(const Conv2dShape& s) {
    return make_window(s.in, s.out(), s.padding);
}
inline Window backward_window(const Conv2dShape& s) {
    return make_window(s.out(), s.in, s.kernel - 1 - s.padding);
}

inline bool suits(const Conv2dShape& s) {
    return s.stride == 1 && (s.kernel == 1 || s.kernel == 3 || s.kernel == 5) &&
           s.padding < s.kernel;
}

// Zero-padded planes of rows in shared memory: [planes][rows][pitch].
struct Planes {
    int planes;  // number in `from` [planes][height][width]; planes beyond are zeros
    int height, width;
    int rows, padding;  // of a plane in shared memory; zeros above and to its left
    int pitch;
};

// Reads `count` planes. A group of lanes in each warp walks along a row, which avoids divisions.
__device__ __forceinline__ void read_planes(const Planes& p, const float* from, int count,
                                            float* to) {
    const int along = p.pitch <= 8 ? 8 : p.pitch <= 16 ? 16 : 32;
    const int column = static_cast<int>(threadIdx.x) & (along - 1);
    const int first = static_cast<int>(threadIdx.x) / along;
    const int step = static_cast<int>(blockDim.x) / along;
    const int step_planes = step / p.rows, step_rows = step - step_planes * p.rows;
    int plane = first / p.rows, row = first - plane * p.rows;
    while (plane < count) {
        const int h = row - p.padding;
        const bool inside = plane < p.planes && h >= 0 && h < p.height;
        const float* const line = from + (plane * p.height + h) * p.width;
        float* const to_line = to + (plane * p.rows + row) * p.pitch;
        // Most rows take one iteration.
        SIMT_NO_UNROLL
        for (int at = column; at < p.pitch; at += along) {
            const int w = at - p.padding;
            to_line[at] = inside && w >= 0 && w < p.width ? line[w] : 0.0f;
        }
        plane += step_planes;
        row += step_rows;
        if (row >= p.rows) {
            row -= p.rows;
            ++plane;
        }
    }
}

// Reads images [first, first + count) of `from` [n][channels][height][width] into `to`
// [count][channels][rows][pitch].
__device__ __forceinline__ void read_padded(const Window& window, const float* from,
                                            std::int64_t first, int count, float* to) {
    const int planes = count * window.channels;
    read_planes({planes, window.height, window.width, window.height + 2 * window.padding,
                 window.padding, window.pitch},
                from + first * window.channels * window.height * window.width, planes, to);
}

// Reads the pixels of an input row that one row of the kernel needs for kPixels outputs.
template <int kKernel>
__device__ __forceinline__ void read_pixels(const float* from, float (&pixel)[2 * kPixels]) {
    read4(from, pixel);
    if constexpr (kKernel > 1) {
        read4(from + kPixels, pixel + kPixels);
    }
}

}  // namespace gyre::SIMT_NAMESPACE::direct
