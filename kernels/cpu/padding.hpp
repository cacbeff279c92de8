// Zero-padded copies of one block of images, for windows that extend beyond the edge.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/cpu/simd.hpp"
#include "kernels/cpu/thread_pool.hpp"
#include "kernels/ops/shapes.hpp"

namespace gyre::cpu {

// Padded planes of `height` x `width` pixels including padding, with `before` lines of zeros above
// and `before` columns of zeros to the left.
struct PaddedPlane {
    int height = 0, width = 0, before = 0;
    std::int64_t line_floats() const { return std::int64_t{width} * kLanes; }
    std::int64_t plane_floats() const { return height * line_floats(); }
};

// Writes padded [channels][to.height][to.width][lane]: a `shape` block surrounded by zeros.
// fill(channel, first) writes the channel's pixels from `first` on, with to.line_floats() per line.
template <typename Fill>
void pad_block(ThreadPool& pool, const Shape& shape, const PaddedPlane& to, float* padded,
               Fill&& fill) {
    const std::int64_t line = to.line_floats();
    const std::int64_t left = std::int64_t{to.before} * kLanes;
    const std::int64_t right = left + std::int64_t{shape.width} * kLanes;
    pool.parallel_for(shape.channels, [&](std::int64_t channel, int) {
        float* plane = padded + channel * to.plane_floats();
        float* const first = plane + to.before * line;
        std::fill_n(plane, to.before * line, 0.0f);
        for (int row = 0; row < shape.height; ++row) {
            std::fill_n(first + row * line, left, 0.0f);
            std::fill_n(first + row * line + right, line - right, 0.0f);
        }
        const int below = to.height - to.before - shape.height;
        std::fill_n(first + shape.height * line, below * line, 0.0f);
        fill(channel, first + left);
    });
}

// Pads x [channels][height][width][lane].
inline void pad_block(ThreadPool& pool, const Shape& shape, const PaddedPlane& to, const float* x,
                      float* padded) {
    const std::int64_t line = std::int64_t{shape.width} * kLanes;
    pad_block(pool, shape, to, padded, [&](std::int64_t channel, float* first) {
        const float* from = x + channel * shape.height * line;
        for (int row = 0; row < shape.height; ++row) {
            std::copy_n(from + row * line, line, first + row * to.line_floats());
        }
    });
}

}  // namespace gyre::cpu
