// Loops over flat arrays, 16 bytes at a time. Arrays begin at a multiple of 16 bytes.
#pragma once

#include <algorithm>

#include "kernels/cuda/kernels.hpp"
#include "kernels/cuda/simt.hpp"

namespace gyre::SIMT_NAMESPACE {

__device__ __forceinline__ float4 load4(const float* at) {
    return *reinterpret_cast<const float4*>(at);
}
__device__ __forceinline__ void store4(float* at, const float4& value) {
    *reinterpret_cast<float4*>(at) = value;
}
// Four floats at `from`, a multiple of 16 bytes, into values[0..3].
__device__ __forceinline__ void read4(const float* from, float* values) {
    const float4 four = load4(from);
    values[0] = four.x;
    values[1] = four.y;
    values[2] = four.z;
    values[3] = four.w;
}

// The first element, and the distance to the next, of this thread in a grid-stride loop over
// quads: threads take consecutive quads, so that a warp's accesses are coalesced.
template <typename Quad, typename Single>
__device__ __forceinline__ void for_each_quad(std::int64_t elems, Quad quad, Single single) {
    const std::int64_t thread = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
    const std::int64_t threads = std::int64_t{gridDim.x} * blockDim.x;
    const std::int64_t whole = elems / 4 * 4;
    for (std::int64_t i = thread * 4; i < whole; i += threads * 4) {
        quad(i);
    }
    if (whole + thread < elems) {
        single(whole + thread);
    }
}

constexpr unsigned kElementwiseBlock = 256;

// Starts kernel(elems, arguments...) with enough blocks to fill the GPU several times over.
template <typename... P, typename... A>
void launch_elementwise(const char* name, void (*kernel)(std::int64_t, P...),
                        const Context& context, std::int64_t elems, A... arguments) {
    if (elems == 0) {
        return;
    }
    const std::int64_t blocks = (elems + 4 * kElementwiseBlock - 1) / (4 * kElementwiseBlock);
    const std::int64_t most = std::int64_t{context.multiprocessors} * 32;
    launch(name, kernel, dim3(static_cast<unsigned>(std::min(blocks, most))),
           dim3(kElementwiseBlock), context.stream, elems, arguments...);
}

}  // namespace gyre::SIMT_NAMESPACE
