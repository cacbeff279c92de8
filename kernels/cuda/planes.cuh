// Elements of planes by their index, and the windows that slide over a plane.
#pragma once

#include <cstdint>

#include "kernels/cuda/simt.hpp"

namespace gyre::SIMT_NAMESPACE {

// The coordinates of element `index` in planes of height x width.
struct Place {
    std::int64_t plane;
    int row, col;
};
__device__ __forceinline__ Place place_of(std::int64_t index, int height, int width) {
    const std::int64_t line = index / width;
    return {line / height, static_cast<int>(line % height), static_cast<int>(index % width)};
}
__device__ __forceinline__ std::int64_t thread_index() {
    return std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
}

// The first window of `kernel` inputs, `stride` apart, that contains input `at`.
__device__ __forceinline__ int first_window(int at, int kernel, int stride) {
    return at < kernel ? 0 : (at - kernel) / stride + 1;
}

}  // namespace gyre::SIMT_NAMESPACE
