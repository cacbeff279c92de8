#include "kernels/emulation/warp.hpp"

#include <bit>

namespace gyre::emulated::emulator {
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
// The layout of the fragments: kernels/cuda/simt.hpp. The hardware ignores the 13 low bits.
void mma(const WarpOperands& operands) {
    const auto number = [](std::uint32_t bits) { return std::bit_cast<float>(bits & ~0x1fffu); };
    float a[16][8], b[8][8];
    for (unsigned i = 0; i < kWarp; ++i) {
        const Mma& m = *static_cast<Mma*>(operands[i]);
        const unsigned group = i / 4, at = i % 4;
        a[group][at] = number(m.a[0]);
        a[group + 8][at] = number(m.a[1]);
        a[group][at + 4] = number(m.a[2]);
        a[group + 8][at + 4] = number(m.a[3]);
        b[at][group] = number(m.b[0]);
        b[at + 4][group] = number(m.b[1]);
    }
    for (unsigned i = 0; i < kWarp; ++i) {
        const Mma& m = *static_cast<Mma*>(operands[i]);
        for (unsigned j = 0; j < 4; ++j) {
            const unsigned row = i / 4 + (j / 2) * 8, column = i % 4 * 2 + j % 2;
            float sum = 0.0f;
            for (unsigned k = 0; k < 8; ++k) {
                sum += a[row][k] * b[k][column];
            }
            m.d[j] += sum;
        }
    }
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
            return mma(operands);
    }
}

int mma_flop(WarpOperation operation) {
    return operation == WarpOperation::mma_tf32 ? 2 * 16 * 8 * 8 : 0;
}

}  // namespace gyre::emulated::emulator
