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

// Floats per vector register, and how many accumulators fit beside the operands.
#if defined(__AVX512F__)
inline constexpr int kVec = 16;
inline constexpr int kTileRows = 6;  // output channels in a register tile
#elif defined(__AVX__)
inline constexpr int kVec = 8;
inline constexpr int kTileRows = 3;
#elif defined(__aarch64__)
inline constexpr int kVec = 4;
inline constexpr int kTileRows = 6;
#else
inline constexpr int kVec = 4;
inline constexpr int kTileRows = 3;
#endif
inline constexpr int kTileCols = 4;  // pixels (or image blocks) in a register tile

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
// ReLU: NaN stays NaN.
inline Vec clip_below_zero(Vec v) {
    return v <= 0.0f ? Vec{} : v;
}

}  // namespace gyre::cpu
