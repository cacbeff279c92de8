// The interface of one compilation of this folder.
#pragma once

#include "kernels/ops/backend.hpp"

namespace gyre {

struct CpuKernels {
    const char* name;   // value of GYRE_CPU: sse4, avx2, avx512, neon
    const char* title;  // for display: AVX-512
    int vector_floats;  // per register
    Backend* (*make_backend)(int threads);
    // GFLOP/s of independent fused multiply-adds on one core, on floats in registers; best of
    // several runs.
    double (*measure_peak)();
    // True if products of bfloat16 values are faster than float32's.
    bool (*has_bf16_products)();
};

}  // namespace gyre
