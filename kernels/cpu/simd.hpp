// Vector types of the CPU kernels.
//
// Activations are stored with the image as the fastest dimension: [block][channel][row][column]
// [lane], kLanes images to a block. A vector register then holds one position of several images,
// so every layer vectorises whatever its width, and weights are scalars that are broadcast.
#pragma once

#include <cstdint>
#include <cstring>

namespace gyre::cpu {

inline constexpr int kLanes = 16;  // images per block, the same on every machine

// Floats per vector register, and the register tile: kTileRows output channels of kTileCols pixels
// (or image blocks), of which it holds kTileVecs registers at a time. The accumulators leave room
// for an operand of each column and one weight: 6 x 4 of 32 registers, 6 x 2 of 16.
inline constexpr int kTileRows = 6;
#if defined(__AVX512F__)
inline constexpr int kRegisters = 32, kVec = 16, kTileCols = 4, kTileVecs = 1;
#elif defined(__AVX__)
inline constexpr int kRegisters = 16, kVec = 8, kTileCols = 1, kTileVecs = 2;
#elif defined(__aarch64__)
inline constexpr int kRegisters = 32, kVec = 4, kTileCols = 1, kTileVecs = 4;
#else
inline constexpr int kRegisters = 16, kVec = 4, kTileCols = 1, kTileVecs = 2;
#endif

using Vec = float __attribute__((vector_size(kVec * sizeof(float))));
using LaneVec = float __attribute__((vector_size(kLanes * sizeof(float))));

inline Vec load(const float* p) {
    Vec v;
    std::memcpy(&v, p, sizeof v);
    return v;
}
inline void store(float* p, Vec v) {
    std::memcpy(p, &v, sizeof v);
}
inline Vec broadcast(float x) {
    return x - Vec{};
}
// Keeps g++ from loading a value again for each of its uses, which saves a register that the tiles
// can spare.
inline void load_once(Vec& v) {
#if defined(__AVX512F__)
    asm("" : "+v"(v));
#elif defined(__x86_64__)
    asm("" : "+x"(v));
#else
    static_cast<void>(v);
#endif
}
// ReLU: NaN stays NaN.
inline Vec clip_below_zero(Vec v) {
    return v <= 0.0f ? Vec{} : v;
}

// Its gradient: d where y > 0 (or NaN), else 0.
inline Vec pass_above_zero(Vec y, Vec d) {
    return y <= 0.0f ? Vec{} : d;
}

}  // namespace gyre::cpu
