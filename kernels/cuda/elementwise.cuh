// Loops over flat arrays, 16 bytes at a time. Arrays begin at a multiple of 16 bytes.
#pragma once

#include <algorithm>

#include "kernels/cuda/kernels.hpp"
#include "kernels/cuda/simt.hpp"

namespace gyre::SIMT_NAMESPACE {

__device__ __forceinline__ float4 load4(const float* at) {
    return load_vector<float4>(at);
}
__device__ __forceinline__ void store4(float* at, const float4& value) {
    store_vector(at, value);
}
// Four floats at `from`, a multiple of 16 bytes, into values[0..3].
__device__ __forceinline__ void read4(const float* from, float* values) {
    const float4 four = load4(from);
    values[0] = four.x;
    values[1] = four.y;
    values[2] = four.z;
    values[3] = four.w;
}

// Calls quad(i) for the thread's four elements i .. i + 3, or single(i) for one of the up to three
// that remain at the end. One quad a thread: a loop over more would only be unrolled, and its loads
// cannot pass the stores before them.
template <typename Quad, typename Single>
__device__ __forceinline__ void for_my_quad(std::int64_t elems, Quad quad, Single single) {
    const std::int64_t thread = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
    const std::int64_t whole = elems / 4 * 4;
    if (thread * 4 < whole) {
        quad(thread * 4);
    } else if (thread * 4 == whole) {
        for (std::int64_t i = whole; i < elems; ++i) {
            single(i);
        }
    }
}

// Element i is the gradient g. Not finite: an exponent of ones only.
__device__ __forceinline__ void check_finite(const FiniteCheck& check, std::int64_t i, float g) {
    if (!(fabsf(g) <= 3.402823466e38f) && check.word != nullptr) {
        atomic_max(check.word,
                   static_cast<std::int32_t>(1 + (check.first_elem + i) / FiniteCheck::kGrain));
    }
}
// Elements i .. i + 3, i being a multiple of 4: they lie in one grain.
__device__ __forceinline__ void check_finite(const FiniteCheck& check, std::int64_t i,
                                             const float4& g) {
    // Finite sums of magnitudes can overflow only where a term is beyond 2^126: then all are looked
    // at.
    if (!(fabsf(g.x) + fabsf(g.y) + fabsf(g.z) + fabsf(g.w) <= 3.402823466e38f)) {
        check_finite(check, i, g.x);
        check_finite(check, i, g.y);
        check_finite(check, i, g.z);
        check_finite(check, i, g.w);
    }
}

constexpr unsigned kElementwiseBlock = 256;

// Blocks for a kernel that uses for_my_quad; at least one.
inline unsigned elementwise_blocks(std::int64_t elems) {
    const std::int64_t quads = elems / 4 + 1;  // the last may be less than a quad, or nothing
    return static_cast<unsigned>((quads + kElementwiseBlock - 1) / kElementwiseBlock);
}

// Starts kernel(elems, arguments...).
template <typename... P, typename... A>
void launch_elementwise(const char* name, void (*kernel)(std::int64_t, P...),
                        const Context& context, std::int64_t elems, A... arguments) {
    if (elems > 0) {
        launch(name, kernel, dim3(elementwise_blocks(elems)), dim3(kElementwiseBlock),
               context.stream, elems, arguments...);
    }
}

// The sum over a block of kElementwiseBlock threads, on thread 0, in a fixed order.
__device__ __forceinline__ double block_sum(double value) {
    constexpr int kWarps = kElementwiseBlock / 32;
    SIMT_SHARED(double, of_warp, [kWarps]);
    value = warp_sum(value);
    __syncthreads();  // an earlier sum has been read
    if (threadIdx.x % 32 == 0) {
        of_warp[threadIdx.x / 32] = value;
    }
    __syncthreads();
    double sum = 0.0;
    if (threadIdx.x == 0) {
        for (int w = 0; w < kWarps; ++w) {
            sum += of_warp[w];
        }
    }
    return sum;
}

}  // namespace gyre::SIMT_NAMESPACE
