// Zero-padded copies of one block of images, for windows that hang over the edge.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/cpu/simd.hpp"
#include "kernels/cpu/thread_pool.hpp"
#include "kernels/ops/shapes.hpp"

namespace gyre::cpu {

// A block of images with `before` zero lines above and left of each plane, in a plane of `height`
// x `width` in all.
struct PaddedPlane {
    int height, width, before;
    std::int64_t plane_floats() const { return std::int64_t{height} * width * kLanes; }
};

// x [channels][height][width][lane] into padded [channels][to.height][to.width][lane].
inline void pad_block(ThreadPool& pool, const Shape& shape, const PaddedPlane& to, const float* x,
                      float* padded) {
    const std::int64_t line = std::int64_t{to.width} * kLanes;
    const std::int64_t in_line = std::int64_t{shape.width} * kLanes;
    const std::int64_t left = std::int64_t{to.before} * kLanes;
    pool.parallel_for(shape.channels, [&](std::int64_t channel, int) {
        float* plane = padded + channel * to.plane_floats();
        const float* from = x + channel * shape.plane_elems() * kLanes;
        std::fill_n(plane, to.before * line, 0.0f);
        for (int row = 0; row < shape.height; ++row) {
            float* out = plane + (row + to.before) * line;
            std::fill_n(out, left, 0.0f);
            std::copy_n(from + row * in_line, in_line, out + left);
            std::fill_n(out + left + in_line, line - left - in_line, 0.0f);
        }
        const int below = to.height - to.before - shape.height;
        std::fill_n(plane + (to.before + shape.height) * line, below * line, 0.0f);
    });
}

}  // namespace gyre::cpu
