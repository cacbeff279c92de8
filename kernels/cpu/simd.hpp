// Vector types of the CPU kernels.
//
// Activations are stored with the image as the fastest dimension: [block][channel][row][column]
// [lane], kLanes images per block. A vector register thus holds one position of several images, so
// every layer vectorises regardless of its width, and weights are broadcast scalars.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>

#if defined(__FMA__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace gyre::cpu {

inline constexpr int kLanes = 16;  // images per block, the same on every machine

// Floats per vector register, and the register tile: kTileRows output channels by kTileCols pixels
// (or image blocks), kTileVecs registers of each at a time. The accumulators leave room for one
// operand per column and one weight: 6 x 4 of 32 registers, 6 x 2 of 16.
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
// a * b + c. Compilers form no fused multiply-adds here by themselves (-ffp-contract=off), so all
// sets that have them compute the same bits. SSE4 rounds the product, too.
[[gnu::always_inline]] inline Vec multiply_add(Vec a, Vec b, Vec c) {
#if defined(__AVX512F__)
    return _mm512_fmadd_ps(a, b, c);
#elif defined(__FMA__)
    return _mm256_fmadd_ps(a, b, c);
#elif defined(__aarch64__)
    return vfmaq_f32(c, a, b);
#else
    return a * b + c;
#endif
}
[[gnu::always_inline]] inline Vec multiply_add(float a, Vec b, Vec c) {
    return multiply_add(broadcast(a), b, c);
}
// Keeps g++ from reloading a value for each of its uses, which saves a register that the tiles do
// not need.
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

// ReLU's gradient: d where y > 0 (or NaN), else 0.
inline Vec pass_above_zero(Vec y, Vec d) {
    return y <= 0.0f ? Vec{} : d;
}

// The sum of the values of kLanes images, the second half added to the first, and so on: in the
// same order whatever a register holds.
inline float lane_sum(const float* lanes) {
    Vec part[kLanes / kVec];
    for (int v = 0; v < kLanes / kVec; ++v) {
        part[v] = load(lanes + v * kVec);
    }
    for (int half = kLanes / kVec / 2; half > 0; half /= 2) {
        for (int v = 0; v < half; ++v) {
            part[v] += part[v + half];
        }
    }
    float last[kVec];
    store(last, part[0]);
    for (int half = kVec / 2; half > 0; half /= 2) {
        for (int l = 0; l < half; ++l) {
            last[l] += last[l + half];
        }
    }
    return last[0];
}

// Adds values[0], values[kLanes], ... to four sums in turn: as independent sums, they hide the
// latency of the additions. Elem: float or Bfloat16.
template <typename Elem>
inline void add_in_turns(const Elem* values, std::ptrdiff_t elems, Vec (&sums)[4]) {
    int turn = 0;
    for (std::ptrdiff_t i = 0; i < elems; i += kLanes) {
        sums[turn++ % 4] += load(values + i);
    }
}

// One step of a transposition: swaps off-diagonal squares of kStep x kStep. low and high are rows
// kStep apart.
template <int kStep, int... kLane>
[[gnu::always_inline]] inline void exchange(Vec& low, Vec& high,
                                            std::integer_sequence<int, kLane...>) {
    const Vec a = low, b = high;
    low = __builtin_shufflevector(a, b, ((kLane & kStep) != 0 ? kVec + kLane - kStep : kLane)...);
    high = __builtin_shufflevector(a, b, ((kLane & kStep) != 0 ? kVec + kLane : kLane + kStep)...);
}
template <int kStep>
[[gnu::always_inline]] inline void transpose_registers(Vec (&rows)[kVec]) {
#pragma GCC unroll 16
    for (int i = 0; i < kVec; ++i) {
        if ((i & kStep) == 0) {
            exchange<kStep>(rows[i], rows[i + kStep], std::make_integer_sequence<int, kVec>{});
        }
    }
    if constexpr (kStep > 1) {
        transpose_registers<kStep / 2>(rows);
    }
}
// to [lane][row] = from [row][lane], kLanes x kLanes floats; from_line and to_line are strides in
// floats. Rows from `rows` on are taken as zero.
inline void transpose(const float* from, std::ptrdiff_t from_line, int rows, float* to,
                      std::ptrdiff_t to_line) {
    for (int row = 0; row < kLanes; row += kVec) {
        for (int lane = 0; lane < kLanes; lane += kVec) {
            Vec square[kVec];
#pragma GCC unroll 16
            for (int i = 0; i < kVec; ++i) {
                square[i] = row + i < rows ? load(from + (row + i) * from_line + lane) : Vec{};
            }
            transpose_registers<kVec / 2>(square);
#pragma GCC unroll 16
            for (int i = 0; i < kVec; ++i) {
                store(to + (lane + i) * to_line + row, square[i]);
            }
        }
    }
}

}  // namespace gyre::cpu
