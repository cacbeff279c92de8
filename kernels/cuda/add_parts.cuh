// Sums over partial results, in an order that depends only on their number.
#pragma once

#include "kernels/cuda/simt.hpp"

namespace gyre::SIMT_NAMESPACE {

constexpr int kAddColumns = 32, kAddRows = 8;

// Sums partial [parts][elems] over the parts, for a block of kAddColumns x kAddRows threads.
// Threads of the first row return the sum of element blockIdx.x * kAddColumns + threadIdx.x, or 0
// past the end. Rows take parts in turn and are added in order. A warp reads 128 bytes of one part.
__device__ __forceinline__ float sum_of_parts(int parts, int elems, const float* partial) {
    SIMT_SHARED(float, of_row, [kAddRows][kAddColumns]);
    const int row = static_cast<int>(threadIdx.y), column = static_cast<int>(threadIdx.x);
    const int elem = static_cast<int>(blockIdx.x) * kAddColumns + column;
    float sum = 0.0f;
    for (int part = row; part < parts && elem < elems; part += kAddRows) {
        sum += partial[std::int64_t{part} * elems + elem];
    }
    of_row[row][column] = sum;
    __syncthreads();
    if (row == 0) {
        for (int other = 1; other < kAddRows; ++other) {
            sum += of_row[other][column];
        }
    }
    return sum;
}

inline dim3 add_blocks(int elems) {
    return dim3(static_cast<unsigned>((elems + kAddColumns - 1) / kAddColumns));
}

}  // namespace gyre::SIMT_NAMESPACE
