// Measures the ceiling of fp32 arithmetic: independent chains of fused multiply-adds in registers.
#pragma once

#include <cstdint>

#include "kernels/cuda/kernels.hpp"

namespace gyre::SIMT_NAMESPACE {

constexpr unsigned kFmaBlock = 256;
constexpr int kFmaChains = 8;  // per thread; with 2048 threads per SM far more than the latency

// out: [blocks * kFmaBlock], so that the compiler cannot omit the arithmetic.
void fma_chains(const Context& context, int rounds, unsigned blocks, float* out);
inline double fma_flop(int rounds, unsigned blocks) {
    return 2.0 * kFmaChains * rounds * blocks * kFmaBlock;
}

}  // namespace gyre::SIMT_NAMESPACE
