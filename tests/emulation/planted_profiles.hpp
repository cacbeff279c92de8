// Kernels whose counts are known, for the profiler. x: kProfileFloats floats; y likewise.
#pragma once

#include "kernels/emulation/runtime.hpp"

namespace simt {

constexpr int kProfileFloats = 4096;

// y[i] = x[stride * i] for one warp of each block, and by float4.
void start_strided(Stream& stream, int stride, const float* x, float* y);
void start_quads(Stream& stream, const float* x, float* y);
// Only the first lanes of a warp load.
void start_some_lanes(Stream& stream, int lanes, const float* x, float* y);
// Lane i goes i + 1 times round a loop that loads.
void start_uneven(Stream& stream, const float* x, float* y);
// A column of a tile [32][32 + pad] in shared memory is read by a warp.
void start_column(Stream& stream, int pad, float* y);
// All lanes read one word of shared memory; or quads, `stride` floats apart.
void start_broadcast(Stream& stream, float* y);
void start_shared_quads(Stream& stream, int stride, float* y);
// Each thread: `times` multiplications with an addition, and a division.
void start_arithmetic(Stream& stream, int times, const float* x, float* y);
// `warps` of 8 warps run a loop `times` times; 3 barriers.
void start_few_warps(Stream& stream, int warps, int times, const float* x, float* y);
// A product on tensor cores by each of 2 warps, 3 times.
void start_mma(Stream& stream, float* y);
// Two clusters of two blocks of a warp: each thread reads a word of the other block, `stride` words
// from its neighbour's; 2 barriers of the cluster.
void start_remote_reads(Stream& stream, int stride, float* y);
// `blocks` blocks read the same 1024 floats and write 256 of their own.
void start_shared_reads(Stream& stream, int blocks, const float* x, float* y);

}  // namespace simt
