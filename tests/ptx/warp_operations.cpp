// Operations that all lanes of a warp do together: shuffles, ldmatrix and mma.
#include "tests/ptx/instructions.hpp"
#include "tests/ptx/memory.hpp"
#include "tests/ptx/narrow.hpp"

namespace gyre::ptx {
namespace {

void nothing(Warp&, const Instruction&, std::uint32_t) {}

void shuffle_butterfly(Warp& warp, const Instruction& instruction, std::uint32_t) {
    std::uint32_t values[kLanes];
    std::memcpy(values, source<std::uint32_t>(warp, instruction, 0), sizeof values);
    for (std::uint32_t lane = 0; lane < kLanes; ++lane) {
        const std::uint32_t distance = source<std::uint32_t>(warp, instruction, 1)[lane] & 31;
        const std::uint32_t bounds = source<std::uint32_t>(warp, instruction, 2)[lane];
        if (source<std::uint32_t>(warp, instruction, 3)[lane] != kAllLanes) {
            warp.fail(instruction, "a shuffle whose mask has not all lanes",
                      static_cast<int>(lane));
        }
        const std::uint32_t segment = bounds >> 8 & 31;
        const std::uint32_t most = (lane & segment) | (bounds & 31 & ~segment);
        const bool valid = (lane ^ distance) <= most;
        result<std::uint32_t>(warp, instruction)[lane] = values[valid ? lane ^ distance : lane];
        if (instruction.results[1] >= 0) {
            result<std::uint32_t>(warp, instruction, 1)[lane] = valid ? 1 : 0;
        }
    }
}

// ldmatrix .m8n8 .x4 .b16: lanes 8 j to 8 j + 7 hold the addresses of the rows of matrix j.
// Register j of lane i gets elements (i / 4, 2 (i % 4)) and (i / 4, 2 (i % 4) + 1) of matrix j, the
// first in the lower half; with .trans those of the transposed matrix.
template <bool kTransposed>
void load_matrices(Warp& warp, const Instruction& instruction, std::uint32_t) {
    std::uint16_t matrices[4][8][8];
    for (int lane = 0; lane < static_cast<int>(kLanes); ++lane) {
        const std::uint32_t address = source<std::uint32_t>(warp, instruction, 0)[lane] +
                                      static_cast<std::uint32_t>(instruction.offset);
        std::memcpy(matrices[lane / 8][lane % 8],
                    shared_memory(warp, instruction, address, 16, lane), 16);
    }
    for (int j = 0; j < 4; ++j) {
        const auto& matrix = matrices[j];
        for (int lane = 0; lane < static_cast<int>(kLanes); ++lane) {
            const int row = lane / 4, column = lane % 4 * 2;
            const std::uint32_t low = kTransposed ? matrix[column][row] : matrix[row][column];
            const std::uint32_t high =
                kTransposed ? matrix[column + 1][row] : matrix[row][column + 1];
            result<std::uint32_t>(warp, instruction, j)[lane] = high << 16 | low;
        }
    }
}

// In what follows, group = lane / 4 and in_group = lane % 4, as in the manual's "Matrix Fragments
// for mma.m16n8k8" (.tf32) and "... for mma.m16n8k16 with floating point type".

// C and D: element i is in row group for i < 2 and group + 8 otherwise, in column
// 2 in_group + i % 2. The manual leaves open in which order the products are added and how the sums
// are rounded; here they are added as the emulator does it, one after another in float32, and C
// last.
template <int kDepth>
void multiply(const Warp& warp, const Instruction& instruction, const float (&a)[16][kDepth],
              const float (&b)[kDepth][8]) {
    float sums[16][8] = {};
    for (int row = 0; row < 16; ++row) {
        for (int k = 0; k < kDepth; ++k) {
            for (int column = 0; column < 8; ++column) {
                sums[row][column] += a[row][k] * b[k][column];
            }
        }
    }
    for (int lane = 0; lane < static_cast<int>(kLanes); ++lane) {
        for (int i = 0; i < 4; ++i) {
            const int row = lane / 4 + (i < 2 ? 0 : 8), column = lane % 4 * 2 + i % 2;
            result<float>(warp, instruction, i)[lane] =
                source<float>(warp, instruction, 6 + i)[lane] + sums[row][column];
        }
    }
}

// A: element i is in row group for i = 0, 2 and group + 8 for 1, 3, in column in_group for i < 2
// and in_group + 4 otherwise. B: element i is in row in_group + 4 i, in column group. The lower 13
// bits of an element do not count.
void mma_tf32(Warp& warp, const Instruction& instruction, std::uint32_t) {
    float a[16][8], b[8][8];
    for (int lane = 0; lane < static_cast<int>(kLanes); ++lane) {
        const int group = lane / 4, in_group = lane % 4;
        const auto value = [&](int i) {
            return std::bit_cast<float>(source<std::uint32_t>(warp, instruction, i)[lane] &
                                        0xffffe000u);
        };
        for (int i = 0; i < 4; ++i) {
            a[group + i % 2 * 8][in_group + i / 2 * 4] = value(i);
        }
        for (int i = 0; i < 2; ++i) {
            b[in_group + i * 4][group] = value(4 + i);
        }
    }
    multiply(warp, instruction, a, b);
}
// Two elements are in a register. A: element i is in row group for i = 0, 1, 4, 5 and group + 8
// otherwise, in column 2 in_group + i % 2, + 8 from i = 4 on. B: element i is in row
// 2 in_group + i % 2, + 8 from i = 2 on, in column group.
template <float (*kValue)(std::uint32_t)>
void mma_halves(Warp& warp, const Instruction& instruction, std::uint32_t) {
    float a[16][16], b[16][8];
    for (int lane = 0; lane < static_cast<int>(kLanes); ++lane) {
        const int group = lane / 4, in_group = lane % 4;
        const auto value = [&](int first, int i) {
            const std::uint32_t word =
                source<std::uint32_t>(warp, instruction, first + i / 2)[lane];
            return kValue(i % 2 == 0 ? word & 0xffffu : word >> 16);
        };
        for (int i = 0; i < 8; ++i) {
            const bool upper = i < 2 || (i >= 4 && i < 6);
            a[upper ? group : group + 8][in_group * 2 + i % 2 + (i < 4 ? 0 : 8)] = value(0, i);
        }
        for (int i = 0; i < 4; ++i) {
            b[in_group * 2 + i % 2 + (i < 2 ? 0 : 8)][group] = value(4, i);
        }
    }
    multiply(warp, instruction, a, b);
}

}  // namespace

void add_warp_operations(Handlers& handlers) {
    handlers.add("bar.warp.sync", nothing);
    handlers.add("shfl.sync.bfly.b32", shuffle_butterfly);
    handlers.add("ldmatrix.sync.aligned.m8n8.x4.shared.b16", load_matrices<false>);
    handlers.add("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16", load_matrices<true>);
    handlers.add("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32", mma_tf32);
    handlers.add("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32", mma_halves<float_of_bf16>);
    handlers.add("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32", mma_halves<float_of_f16>);
}

}  // namespace gyre::ptx
