// The CPU's kernels, which are compiled once for each set of instructions that a processor of this
// kind may have. The best that it has is chosen at the start.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "kernels/backend.hpp"

namespace gyre {

// One compilation of kernels/cpu.
struct CpuKernels {
    const char* name;   // as GYRE_CPU has it: sse4, avx2, avx512, neon
    const char* title;  // as people write it: AVX-512
    int vector_floats;  // of a register
    Backend* (*make_backend)(int threads);
    // GFLOP/s of independent fused multiply-adds on one core: products and sums of floats that
    // never leave the registers, best of several runs.
    double (*measure_peak)();
};

// Those that this processor can run, the best first.
std::vector<const CpuKernels*> available_cpu_kernels();
// The best, or the environment's GYRE_CPU. Throws Error (usage) where this processor cannot.
const CpuKernels& chosen_cpu_kernels();

// threads: workers inside this process, >= 1.
std::unique_ptr<Backend> make_cpu_backend(const CpuKernels& kernels, int threads);

}  // namespace gyre
