// Kernels that expose the warp's matrix operations.
#pragma once

#include <cstdint>

#include "kernels/cuda/runtime.hpp"

namespace gyre::SIMT_NAMESPACE {

enum class MatrixType { tf32, bf16, f16 };

// The operands' layout in shared memory: rows of m or n, or rows of k (16 bits only).
enum class MatrixLayout { rows, transposed };

// d[16][8] = a[16][k] b[8][k], with k = 8 for TF32, otherwise 16; a and b as words, with two
// elements per word for 16 bits: [row][8 words].
void start_fragments(Stream& stream, MatrixType type, MatrixLayout layout, const std::uint32_t* a,
                     const std::uint32_t* b, float* d);

// c[m][n] = sum over k of a(m, k) b(n, k), as operations compute it on a GPU with this many
// multiprocessors. Operands have 16 or 32 bits, with floats_b b always 32; rows: a [m][k], b
// [n][k]; transposed: a [k][m], b [k][n], and b is if a is. Pitches are multiples of 16 bytes.
struct TensorProduct {
    MatrixType type;
    MatrixLayout layout_a, layout_b;
    int m, n, k, pitch_a, pitch_b;
    bool floats_b = false;
};
void run_tensor_product(const TensorProduct& product, int multiprocessors, const void* a,
                        const void* b, float* c);

#if !defined(GYRE_EMULATED)
// Returns whether this build contains these kernels for the current GPU.
bool has_tensor_kernels();
#endif

}  // namespace gyre::SIMT_NAMESPACE
