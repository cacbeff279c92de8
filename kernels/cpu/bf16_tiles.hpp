// Sums of products of bfloat16 values in tiles of 16 x 16, by the instruction TDPBF16PS of
// processors with AMX (Intel, "Architecture Instruction Set Extensions", chapter 3), or to the same
// bits by fused multiply-adds. A step adds the products of `pairs` pairs of depths to each sum:
//
//   sum[m][n] += (a[m][0] b[0][n] + a[m][2] b[2][n] + ...) + (a[m][1] b[1][n] + a[m][3] b[3][n]
//   ...)
//
// where each of the brackets is added up in order from zero. Subnormal operands count as zero, and
// results that are subnormal become zero.
#pragma once

#include <cstddef>

#include "kernels/cpu/bf16.hpp"

namespace gyre::cpu {

inline constexpr int kTileExtent = 16;  // rows and columns
inline constexpr int kTileSums = kTileExtent * kTileExtent;
inline constexpr int kMostPairs = 16;          // of depths in a step,
inline constexpr int kDepth = 2 * kMostPairs;  // which has so many products for each sum
inline constexpr std::ptrdiff_t kOperandElems = kTileExtent * kDepth;  // of a tile of a or b

inline int tiles_of(int channels) {
    return (channels + kTileExtent - 1) / kTileExtent;
}

// The operands of all steps: those of step (i, j) are at a_outer[i] + j * a_inner, and so are b's;
// in values. a [16][pairs][2], b [pairs][16][2].
struct Bf16Loops {
    int outer = 0, inner = 0;
    const std::ptrdiff_t *a_outer = nullptr, *b_outer = nullptr;
    std::ptrdiff_t a_inner = 0, b_inner = 0;
};

// Up to 2 x 2 tiles of sums, which have `rows` tiles of a and `cols` of b.
struct Bf16Operands {
    const Bfloat16 *a[2] = {}, *b[2] = {};
    float* sums[2][2] = {};  // [16][16] each
    int rows = 1, cols = 1;
    bool first = true;  // sums are zero before
};

// True if this processor has the instruction, and the system lets this process use it.
bool has_tile_products();

// While it exists, its thread may add products of steps of so many pairs.
class Bf16Tiles {
 public:
    explicit Bf16Tiles(int pairs);
    ~Bf16Tiles();
    Bf16Tiles(const Bf16Tiles&) = delete;
    Bf16Tiles& operator=(const Bf16Tiles&) = delete;

    void add(const Bf16Loops& loops, const Bf16Operands& op) const;

 private:
    const int pairs_;
};

}  // namespace gyre::cpu
