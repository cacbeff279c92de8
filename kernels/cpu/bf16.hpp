// Bfloat16 values in memory, which are floats in registers.
#pragma once

#include <cstdint>
#include <cstring>

#include "base/data_type.hpp"
#include "base/round_up.hpp"
#include "kernels/cpu/simd.hpp"
#include "kernels/ops/op.hpp"

namespace gyre::cpu {

struct Bfloat16 {
    std::uint16_t bits;
};

using HalfVec = std::uint16_t __attribute__((vector_size(kVec * sizeof(std::uint16_t))));
using WordVec = std::uint32_t __attribute__((vector_size(sizeof(Vec))));

inline Vec load(const Bfloat16* p) {
    HalfVec half;
    std::memcpy(&half, p, sizeof half);
    return reinterpret_cast<Vec>(__builtin_convertvector(half, WordVec) << 16);
}
// Rounds as narrow::to_bfloat16().
inline void store(Bfloat16* p, Vec v) {
    const auto bits = reinterpret_cast<WordVec>(v);
    const WordVec rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    const WordVec result = v != v ? (bits >> 16) | 0x40u : rounded;
    const auto half = __builtin_convertvector(result, HalfVec);
    std::memcpy(p, &half, sizeof half);
}

// The floats of memory that so many values take, in whole cache lines.
inline std::int64_t floats_of(std::int64_t values) {
    return round_up<std::int64_t>((values + 1) / 2, 16);
}

// The values of a tensor of this type.
template <typename Elem>
Elem* values(const Tensor& tensor) {
    return static_cast<Elem*>(tensor.data);
}

}  // namespace gyre::cpu
