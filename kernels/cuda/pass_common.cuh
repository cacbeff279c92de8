// Shared parts of the pass kernel's steps. All threads of the block call each function, after a
// barrier behind all writes to its input. Only functions that say so end with a barrier.
#pragma once

#include "kernels/cuda/elementwise.cuh"
#include "kernels/cuda/pass_program.hpp"

namespace gyre::SIMT_NAMESPACE {

__device__ __forceinline__ int divide(int i, const Divisor& d) {
    const auto product = static_cast<std::uint64_t>(static_cast<std::uint32_t>(i)) * d.inverse;
    return d.inverse == 0 ? i : static_cast<int>(product >> 32);
}

struct Element {
    int c, h, w;
};
__device__ __forceinline__ Element element(const Planes& p, int i) {
    const int c = divide(i, p.by_plane);
    const int in_plane = i - c * p.by_plane.divisor;
    const int h = divide(in_plane, p.by_width);
    return {c, h, in_plane - h * p.width};
}
__device__ __forceinline__ int place(const Planes& p, const Element& e) {
    return p.begin + e.c * p.plane + e.h * p.pitch + e.w;
}
__device__ __forceinline__ int place(const Planes& p, int i) {
    return place(p, element(p, i));
}

// ReLU's output or, if `where` is that output, its gradient: 0 where `where` is <= 0, else value.
__device__ __forceinline__ float rectify(float value, float where) {
    return where <= 0.0f ? 0.0f : value;
}

__device__ __forceinline__ int pass_thread() {
    return static_cast<int>(threadIdx.x);
}

}  // namespace gyre::SIMT_NAMESPACE
