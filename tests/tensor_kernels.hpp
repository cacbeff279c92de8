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

// c[m][n] = sum over k of a(m, k) b(n, k), as operations compute it on a GPU of so many
// multiprocessors. Operands of 16 or 32 bits, floats_b: b of 32 all the same; rows: a [m][k],
// b [n][k]; transposed: a [k][m], b [k][n]. Pitches are multiples of 16 bytes.
struct TensorProduct {
    MatrixType type;
    MatrixLayout layout_a, layout_b;
    int m, n, k, pitch_a, pitch_b;
    bool floats_b = false;
};
void run_tensor_product(const TensorProduct& product, int multiprocessors, const void* a,
                        const void* b, float* c);

}  // namespace gyre::SIMT_NAMESPACE
