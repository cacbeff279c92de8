// Compute-bound: 2 kFmaChains FLOPs per thread and round; each thread writes 4 bytes.
#include "bench/ceilings.hpp"

#include "kernels/cuda/simt.hpp"

namespace gyre::SIMT_NAMESPACE {
namespace {

// Values stay near shift / (1 - factor), which are normal numbers.
__global__ void fma_kernel(int rounds, float factor, float shift, float* out) {
    float chain[kFmaChains];
    SIMT_UNROLL
    for (int i = 0; i < kFmaChains; ++i) {
        chain[i] = static_cast<float>(threadIdx.x) * 0.001f + static_cast<float>(i);
    }
    for (int round = 0; round < rounds; ++round) {
        SIMT_UNROLL
        for (int i = 0; i < kFmaChains; ++i) {
            chain[i] = fmaf(chain[i], factor, shift);
        }
    }
    float sum = 0.0f;
    SIMT_UNROLL
    for (int i = 0; i < kFmaChains; ++i) {
        sum += chain[i];
    }
    out[blockIdx.x * kFmaBlock + threadIdx.x] = sum;
}

}  // namespace

void fma_chains(const Context& context, int rounds, unsigned blocks, float* out) {
    launch("fma_chains", fma_kernel, dim3(blocks), dim3(kFmaBlock), context.stream, rounds, 0.999f,
           0.001f, out);
}

}  // namespace gyre::SIMT_NAMESPACE
