// Kernels that show what the warp's matrix operations do.
#pragma once

#include <cstdint>

#include "kernels/cuda/runtime.hpp"

namespace gyre::SIMT_NAMESPACE {

enum class MatrixType { tf32, bf16, f16 };

// How the operands lie in shared memory: rows of m or n, or rows of k (16 bits only).
enum class MatrixLayout { rows, transposed };

// d[16][8] = a[16][k] b[8][k], k being 8 for TF32 and 16 else; a and b as words, two elements in
// one for 16 bits: [row][8 words].
void start_fragments(Stream& stream, MatrixType type, MatrixLayout layout, const std::uint32_t* a,
                     const std::uint32_t* b, float* d);

}  // namespace gyre::SIMT_NAMESPACE
