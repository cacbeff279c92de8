// Included by nvcc before the kernels whose PTX is run without a GPU: expf and logf become
// instructions for which the interpreter calls the host's functions, as the emulator does. Then
// both executions agree to the last bit also where a kernel uses these functions, and no tolerance
// can hide a difference. What nvcc makes of expf and logf themselves is compared with the exact
// values in functions_test.cpp.
//
// nvcc wants instructions that exist: sine and cosine stand for the two, as no kernel uses them.
// One that did would not compute what the emulator does, and would be noticed.
#pragma once

#include <cuda_runtime.h>

__device__ __forceinline__ float gyre_host_expf(float value) {
    float power;
    asm("sin.approx.f32 %0, %1;" : "=f"(power) : "f"(value));
    return power;
}
__device__ __forceinline__ float gyre_host_logf(float value) {
    float logarithm;
    asm("cos.approx.f32 %0, %1;" : "=f"(logarithm) : "f"(value));
    return logarithm;
}
#define expf gyre_host_expf
#define logf gyre_host_logf
