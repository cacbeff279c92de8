#include "kernels/emulation/warp.hpp"

#include <bit>

namespace simt::emulator {
namespace {

template <typename T>
void butterfly_sum(const WarpOperands& operands) {
    std::array<T, kWarp> value, next;
    for (unsigned i = 0; i < kWarp; ++i) {
        value[i] = *static_cast<T*>(operands[i]);
    }
    for (unsigned distance = kWarp / 2; distance > 0; distance /= 2) {
        for (unsigned i = 0; i < kWarp; ++i) {
            next[i] = value[i] + value[i ^ distance];
        }
        value = next;
    }
    for (unsigned i = 0; i < kWarp; ++i) {
        *static_cast<T*>(operands[i]) = value[i];
    }
}
void argmax(const WarpOperands& operands) {
    ArgMax best = *static_cast<ArgMax*>(operands[0]);
    for (unsigned i = 1; i < kWarp; ++i) {
        const ArgMax& other = *static_cast<ArgMax*>(operands[i]);
        if (other.value > best.value || (other.value == best.value && other.index < best.index)) {
            best = other;
        }
    }
    for (unsigned i = 0; i < kWarp; ++i) {
        *static_cast<ArgMax*>(operands[i]) = best;
    }
}
// The layout of the fragments is described in kernels/cuda/simt.hpp.
void load_matrices(const WarpOperands& operands) {
    for (unsigned i = 0; i < kWarp; ++i) {
        for (unsigned matrix = 0; matrix < 4; ++matrix) {
            const auto& source = *static_cast<LoadMatrices*>(operands[matrix * 8 + i / 4]);
            static_cast<LoadMatrices*>(operands[i])->result[matrix] = source.row[i % 4];
        }
    }
}
void load_matrices_transposed(const WarpOperands& operands) {
    for (unsigned i = 0; i < kWarp; ++i) {
        const unsigned column = i / 4;
        for (unsigned matrix = 0; matrix < 4; ++matrix) {
            const auto element = [&](unsigned row) {
                const auto& source = *static_cast<LoadMatrices*>(operands[matrix * 8 + row]);
                return source.row[column / 2] >> column % 2 * 16 & 0xffffu;
            };
            static_cast<LoadMatrices*>(operands[i])->result[matrix] =
                element(i % 4 * 2) | element(i % 4 * 2 + 1) << 16;
        }
    }
}

// The hardware ignores the 13 low bits.
float tf32_value(std::uint32_t bits) {
    return std::bit_cast<float>(bits & ~0x1fffu);
}
float bf16_value(std::uint32_t bits) {
    return std::bit_cast<float>(bits << 16);
}
float f16_value(std::uint32_t bits) {
    const std::uint32_t sign = (bits & 0x8000u) << 16, rest = bits & 0x7fffu;
    const float magnitude =
        rest >= 0x7c00u ? std::bit_cast<float>(0x7f800000u | (rest & 0x3ffu) << 13)
                        : std::bit_cast<float>(rest << 13) * 0x1p112f;  // 127 - 15: the exponents
    return std::bit_cast<float>(std::bit_cast<std::uint32_t>(magnitude) | sign);
}

// d[16][8] += a[16][kDepth] b[kDepth][8]
template <unsigned kDepth>
void multiply(const WarpOperands& operands, const float (&a)[16][kDepth],
              const float (&b)[kDepth][8]) {
    for (unsigned i = 0; i < kWarp; ++i) {
        const Mma& m = *static_cast<Mma*>(operands[i]);
        for (unsigned j = 0; j < 4; ++j) {
            const unsigned row = i / 4 + (j / 2) * 8, column = i % 4 * 2 + j % 2;
            float sum = 0.0f;
            for (unsigned k = 0; k < kDepth; ++k) {
                sum += a[row][k] * b[k][column];
            }
            m.d[j] += sum;
        }
    }
}
void mma_of_words(const WarpOperands& operands) {
    float a[16][8], b[8][8];
    for (unsigned i = 0; i < kWarp; ++i) {
        const Mma& m = *static_cast<Mma*>(operands[i]);
        const unsigned group = i / 4, at = i % 4;
        for (unsigned j = 0; j < 4; ++j) {
            a[group + j % 2 * 8][at + j / 2 * 4] = tf32_value(m.a[j]);
        }
        for (unsigned j = 0; j < 2; ++j) {
            b[at + j * 4][group] = tf32_value(m.b[j]);
        }
    }
    multiply(operands, a, b);
}
// The lower half of a word is the first element.
void mma_of_halves(const WarpOperands& operands, float (*value)(std::uint32_t)) {
    float a[16][16], b[16][8];
    for (unsigned i = 0; i < kWarp; ++i) {
        const Mma& m = *static_cast<Mma*>(operands[i]);
        const unsigned group = i / 4, at = i % 4 * 2;
        for (unsigned half = 0; half < 2; ++half) {
            const auto part = [&](std::uint32_t word) {
                return value(word >> half * 16 & 0xffffu);
            };
            for (unsigned j = 0; j < 4; ++j) {
                a[group + j % 2 * 8][at + half + j / 2 * 8] = part(m.a[j]);
            }
            for (unsigned j = 0; j < 2; ++j) {
                b[at + half + j * 8][group] = part(m.b[j]);
            }
        }
    }
    multiply(operands, a, b);
}
}  // namespace

void compute(WarpOperation operation, const WarpOperands& operands) {
    switch (operation) {
        case WarpOperation::sync:
            return;
        case WarpOperation::sum_float:
            return butterfly_sum<float>(operands);
        case WarpOperation::sum_double:
            return butterfly_sum<double>(operands);
        case WarpOperation::argmax:
            return argmax(operands);
        case WarpOperation::mma_tf32:
            return mma_of_words(operands);
        case WarpOperation::mma_bf16:
            return mma_of_halves(operands, bf16_value);
        case WarpOperation::mma_f16:
            return mma_of_halves(operands, f16_value);
        case WarpOperation::load_matrices:
            return load_matrices(operands);
        case WarpOperation::load_matrices_transposed:
            return load_matrices_transposed(operands);
    }
}

int mma_flop(WarpOperation operation) {
    switch (operation) {
        case WarpOperation::mma_tf32:
            return 2 * 16 * 8 * 8;
        case WarpOperation::mma_bf16:
        case WarpOperation::mma_f16:
            return 2 * 16 * 8 * 16;
        default:
            return 0;
    }
}

}  // namespace simt::emulator
