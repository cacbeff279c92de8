// Loops over flat arrays, 16 bytes at a time. Arrays must be aligned to 16 bytes.
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
// Loads four floats from 16-byte aligned `from` into values[0..3].
__device__ __forceinline__ void read4(const float* from, float* values) {
    const float4 four = load4(from);
    values[0] = four.x;
    values[1] = four.y;
    values[2] = four.z;
    values[3] = four.w;
}

// Calls quad(i) for the thread's four elements [i, i + 4), or single(i) for one of the up to three
// that remain at the end. One quad per thread: a loop over more would only be unrolled, and its
// loads cannot pass the stores before them.
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

// Checks gradient g of element i: it is not finite if its exponent bits are all ones.
__device__ __forceinline__ void check_finite(const FiniteCheck& check, std::int64_t i, float g) {
    if (!(fabsf(g) <= 3.402823466e38f) && check.word != nullptr) {
        atomic_max(check.word,
                   static_cast<std::int32_t>(1 + (check.first_elem + i) / FiniteCheck::kGrain));
    }
}
// Checks elements [i, i + 4), i a multiple of 4, which are in the same grain.
__device__ __forceinline__ void check_finite(const FiniteCheck& check, std::int64_t i,
                                             const float4& g) {
    // Finite magnitudes can sum to infinity only if one exceeds 2^126; then each element is
    // checked.
    if (!(fabsf(g.x) + fabsf(g.y) + fabsf(g.z) + fabsf(g.w) <= 3.402823466e38f)) {
        check_finite(check, i, g.x);
        check_finite(check, i, g.y);
        check_finite(check, i, g.z);
        check_finite(check, i, g.w);
    }
}

constexpr unsigned kElementwiseBlock = 256;

// Number of blocks for a kernel that uses for_my_quad; at least one.
inline unsigned elementwise_blocks(std::int64_t elems) {
    const std::int64_t quads = elems / 4 + 1;  // the last may be partial or empty
    return static_cast<unsigned>((quads + kElementwiseBlock - 1) / kElementwiseBlock);
}

// Launches kernel(elems, arguments...).
template <typename... P, typename... A>
void launch_elementwise(const char* name, void (*kernel)(std::int64_t, P...),
                        const Context& context, std::int64_t elems, A... arguments) {
    if (elems > 0) {
        launch(name, kernel, dim3(elementwise_blocks(elems)), dim3(kElementwiseBlock),
               context.stream, elems, arguments...);
    }
}

// Sums over a block of kElementwiseBlock threads in a fixed order; the result is on thread 0.
__device__ __forceinline__ double block_sum(double value) {
    constexpr int kWarps = kElementwiseBlock / 32;
    SIMT_SHARED(double, of_warp, [kWarps]);
    value = warp_sum(value);
    __syncthreads();  // the previous sum has been read
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
