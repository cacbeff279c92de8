// The matrix product on tensor cores: c[m][n] = sum over k of a(m, k) * b(n, k), operands in TF32
// (float32 in memory) or 16 bits, sums in float32.
//
// Block and grid: 128 threads, 2 x 2 warps, compute a tile of BM x BN, each warp a quarter of it;
// grid (tiles of n, then of m; 1; parts of k). k advances by 128 bytes. Slices are loaded by
// cp.async into kStages buffers in shared memory, of which one is multiplied while the others are
// in flight. If there are too few tiles for a GPU, k is divided among blocks, and the last ones to
// finish add the partial tiles in a fixed order (part_sums.cuh). The number of parts depends only
// on the shape, so every GPU gets the same bits.
// FLOPs 2 M N K; bytes at least (M K + N K) times the element's and 4 M N, plus re-reading by tiles
// of the other side.
//
// In shared memory, an operand that is contiguous along k has rows of one m or n; one that is
// contiguous across k has rows of one k. The 16-byte chunks of a row are permuted depending on the
// row, so that both copies and reads meet each bank once. ldmatrix reads operands contiguous along
// k and, transposing them, 16-bit operands across k; TF32 words across k are read one by one.
// Floats for 16-bit products, such as a layer's fp32 weights, are rounded as they are read.
//
// An operand (tensor_operands.cuh) has
//   Elem      its type in memory; float is allowed for every Math
//   kAlongK   whether it is contiguous along k
//   kRound    whether its floats must still be rounded to TF32 (if the product is in TF32)
//   Cursor<kEach, kStep, kDepth>(operand, row, k, end)   one thread's copies of each slice: along
//             k, the chunk at k of rows row + i * kStep, i < kEach; across k, the chunk at row of
//             k + i * kStep. `end`: the end of the block's part of k.
//   cursor.fetch(operand, copy)   calls copy(i, from, valid) for each i, then advances by kDepth
//             along k
// An epilogue has store<kWhole>(m, n, v): v[j] are the sums of row m + 8 j and columns n, n + 1; n
// is even, m % 32 < 8. kWhole: all of them are inside the matrix, otherwise the epilogue must
// check. If it has a type TakesTile, the whole block calls take_tile<Tile>(sums, first_m, first_n,
// stages) instead, while others may still be reading the stages; k is then not divided.
#pragma once

#include <algorithm>

#include "kernels/cuda/elementwise.cuh"
#include "kernels/cuda/kernels.hpp"
#include "kernels/cuda/part_sums.cuh"
#include "kernels/cuda/simt.hpp"
#include "kernels/cuda/tensor_math.cuh"

namespace gyre::SIMT_NAMESPACE {

constexpr int kTensorBlock = 128;
constexpr int kSliceBytes = 128;  // along k
constexpr int kBandRows = 32;     // rows of m per call of an epilogue, across a warp's threads

template <int BM_, int BN_>
struct TensorTile {
    static constexpr int BM = BM_, BN = BN_;
    // Two blocks share a multiprocessor's registers, and its shared memory if it has 227 KiB. Every
    // GPU since sm_80 has at least 99 KiB for one block.
    static constexpr int kBlocks = 2;
    template <int kStageBytes>
    static constexpr int kStages = (96 << 10) / kStageBytes < 4 ? (96 << 10) / kStageBytes : 4;
};

struct TensorExtents {
    int m, n, k;
    int part_k;  // k per block; a multiple of a slice
    PartGroups parts;
    int tiles_n;
};

// Rounds to the nearest TF32 number, ties away from zero, given that the hardware ignores the 13
// low bits. One instruction on sm_90. NaN stays NaN: for positive NaNs, which is what GPU
// arithmetic produces, the sum would overflow to negative; negative ones overflow only if they have
// 11 leading ones, which not even host arithmetic produces.
__device__ __forceinline__ std::uint32_t nearest_tf32(std::uint32_t bits) {
    const auto rounded = static_cast<std::int32_t>(bits + 0x1000u);
    const auto cut = static_cast<std::int32_t>(bits);
    return static_cast<std::uint32_t>(rounded > cut ? rounded : cut);
}

// An operand's slice in shared memory: kRows of m or n by kDepth of k.
template <typename Math, typename Operand, int kRows>
struct OperandSlice {
    static constexpr bool kAlongK = Operand::kAlongK;
    static constexpr int kElemBytes = sizeof(typename Operand::Elem);
    static constexpr int kDepth = kSliceBytes / static_cast<int>(sizeof(typename Math::Elem));
    static constexpr bool kNarrow = kElemBytes > static_cast<int>(sizeof(typename Math::Elem));
    static constexpr int kChunk = 16 / kElemBytes;
    static constexpr int kPitch = (kAlongK ? kDepth : kRows) * kElemBytes;
    static constexpr int kBytes = kRows * kDepth * kElemBytes;

    // How the threads divide the copies.
    static constexpr int kRowChunks = kPitch / 16;
    static constexpr int kStep = kTensorBlock / kRowChunks;
    static constexpr int kEach = (kAlongK ? kRows : kDepth) / kStep;
    using Cursor = typename Operand::template Cursor<kEach, kStep, kDepth>;

    static __device__ __forceinline__ Cursor cursor(const Operand& operand, int first_row, int k,
                                                    int end) {
        const int thread = static_cast<int>(threadIdx.x);
        const int row = thread / kRowChunks, chunk = thread % kRowChunks * kChunk;
        return kAlongK ? Cursor(operand, first_row + row, k + chunk, end)
                       : Cursor(operand, first_row + chunk, k + row, end);
    }
    static __device__ __forceinline__ void fetch(const Operand& operand, Cursor& cursor,
                                                 unsigned char* slice) {
        const int thread = static_cast<int>(threadIdx.x);
        const int row = thread / kRowChunks, chunk = thread % kRowChunks;
        const int at = row * kPitch + (chunk ^ turned(row)) * 16;
        cursor.fetch(operand, [&](int i, const void* from, bool valid) {
            const int turn = turned(i * kStep) * 16;  // of rows i * kStep apart
            cp_async16(slice + ((at ^ turn) + i * (kStep * kPitch)), from, valid);
        });
    }

    // Fragments of rows [first, first + kCount * 16) at step kk of the slice, as words: [i][0] rows
    // 0-7, first half of the step's k; [i][1] and [i][2] rows 8-15 and the second half, in the
    // order of mma's a (kRowsFirst) or, reversed, of two b; [i][3] both.
    template <int kCount, bool kRowsFirst>
    static __device__ __forceinline__ void fragments(const unsigned char* slice, int first, int kk,
                                                     std::uint32_t (&words)[kCount][4]) {
        const int lane = static_cast<int>(threadIdx.x) % 32;
        if constexpr (!kNarrow && (kAlongK || kElemBytes == 2)) {
            // The lane addresses matrix lane / 8: one of its 8 rows or, across k, one of its 8 k.
            const int low = lane / 8 % 2, high = lane / 16;
            const int rows8 = kRowsFirst ? low : high, k8 = kRowsFirst ? high : low;
            SIMT_UNROLL
            for (int i = 0; i < kCount; ++i) {
                if constexpr (kAlongK) {
                    ldmatrix_x4(words[i], slice + (first + rows8 * 8 + lane % 8) * kPitch +
                                              ((k8 ^ lane % 8) * 16 ^ kk * 32) + i * 16 * kPitch);
                } else {
                    const int chunk = first / 8 + rows8 + i * 2;
                    ldmatrix_x4_transposed(
                        words[i],
                        slice + (kk * 16 + k8 * 8 + lane % 8) * kPitch + (chunk ^ lane % 8) * 16);
                }
            }
        } else {
            SIMT_UNROLL
            for (int i = 0; i < kCount; ++i) {
                SIMT_UNROLL
                for (int j = 0; j < 4; ++j) {
                    const int rows8 = kRowsFirst ? j % 2 : j / 2, half = kRowsFirst ? j / 2 : j % 2;
                    words[i][j] = word(slice, first + i * 16 + rows8 * 8, kk * 2 + half);
                }
            }
        }
        if constexpr (Operand::kRound && Math::kType == DataType::float32) {
            SIMT_UNROLL
            for (int i = 0; i < kCount; ++i) {
                SIMT_UNROLL
                for (int j = 0; j < 4; ++j) {
                    words[i][j] = nearest_tf32(words[i][j]);
                }
            }
        }
    }

 private:
    // The permutation of a row's chunks.
    static constexpr __device__ int turned(int row) {
        return kNarrow                      ? (kAlongK ? row : row / 2) % 4 * 2
               : kAlongK || kElemBytes == 2 ? row % 8
                                            : row % 4 * 2;
    }
    // A lane's word for the 8 rows from `row` on (a multiple of 8) and half a step of k: one k in
    // TF32, or two k in 16 bits that are still stored as floats.
    static __device__ __forceinline__ std::uint32_t word(const unsigned char* slice, int row,
                                                         int half) {
        const int lane = static_cast<int>(threadIdx.x) % 32;
        const int of_rows = lane / 4, of_k = lane % 4;
        if constexpr (kNarrow && kAlongK) {
            const int chunk = (half * 2 + of_k / 2) ^ turned(of_rows);
            const auto pair =
                load_vector<float2>(slice + (row + of_rows) * kPitch + chunk * 16 + of_k % 2 * 8);
            return Math::pack(pair.x, pair.y);
        } else {
            const int chunk = (row / 4 + of_rows / 4) ^ of_k * 2;
            const unsigned char* const from = slice + chunk * 16 + of_rows % 4 * 4;
            if constexpr (kNarrow) {
                const auto* const low =
                    reinterpret_cast<const float*>(from + (half * 8 + of_k * 2) * kPitch);
                return Math::pack(low[0], low[kPitch / 4]);
            } else {
                return *reinterpret_cast<const std::uint32_t*>(from + (half * 4 + of_k) * kPitch);
            }
        }
    }
};

// One thread's sums: its share of the warp's quarter of the tile, in fragments of 16 x 8.
template <typename Tile, typename Math, typename A, typename B>
class TensorSums {
 public:
    using SliceA = OperandSlice<Math, A, Tile::BM>;
    using SliceB = OperandSlice<Math, B, Tile::BN>;
    static constexpr int kM = Tile::BM / 32, kN = Tile::BN / 16;

    __device__ __forceinline__ void add(const unsigned char* slice_a,
                                        const unsigned char* slice_b) {
        SIMT_UNROLL
        for (int kk = 0; kk < 4; ++kk) {
            std::uint32_t a[kM][4], b[kN / 2][4];
            SliceA::template fragments<kM, true>(slice_a, first_m(), kk, a);
            SliceB::template fragments<kN / 2, false>(slice_b, first_n(), kk, b);
            SIMT_UNROLL
            for (int j = 0; j < kN; ++j) {
                const std::uint32_t of_b[2] = {b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]};
                SIMT_UNROLL
                for (int i = 0; i < kM; ++i) {
                    Math::multiply(sum_[i][j], a[i], of_b);
                }
            }
        }
    }
    // Calls body(m, n, v) like an epilogue, with m and n relative to the tile's corner.
    template <typename Body>
    __device__ __forceinline__ void for_each(Body body) const {
        const int lane = static_cast<int>(threadIdx.x) % 32;
        SIMT_UNROLL
        for (int i = 0; i < kM; i += 2) {
            SIMT_UNROLL
            for (int j = 0; j < kN; ++j) {
                const float v[4][2] = {{sum_[i][j][0], sum_[i][j][1]},
                                       {sum_[i][j][2], sum_[i][j][3]},
                                       {sum_[i + 1][j][0], sum_[i + 1][j][1]},
                                       {sum_[i + 1][j][2], sum_[i + 1][j][3]}};
                body(first_m() + i * 16 + lane / 4, first_n() + j * 8 + lane % 4 * 2, v);
            }
        }
    }

 private:
    static __device__ __forceinline__ int first_m() {
        return static_cast<int>(threadIdx.x) / 64 * (Tile::BM / 2);
    }
    static __device__ __forceinline__ int first_n() {
        return static_cast<int>(threadIdx.x) / 32 % 2 * (Tile::BN / 2);
    }

    float sum_[kM][kN][4] = {};
};

// The pitch of a row of partial sums: a multiple of 16 bytes.
__device__ __host__ __forceinline__ int partial_pitch(int n) {
    return (n + 3) / 4 * 4;
}

// Adds parts of a tile, as required by add_as_last. A thread has four rows of a band and four
// adjacent columns at a time.
template <typename Tile, typename Epilogue>
__device__ __forceinline__ void add_tile_parts(const TensorExtents& extents, int first_m,
                                               int first_n, float* partial, int first, int count,
                                               int step, bool all, const Epilogue& epilogue) {
    constexpr int kQuads = Tile::BN / 4, kItems = Tile::BM / 4 * kQuads;
    const int pitch = partial_pitch(extents.n);
    const std::int64_t part_elems = std::int64_t{extents.m} * pitch;
    SIMT_NO_UNROLL
    for (int item = static_cast<int>(threadIdx.x); item < kItems; item += kTensorBlock) {
        const int row = item / kQuads;
        const int m = first_m + row / 8 * kBandRows + row % 8;
        const int n = first_n + item % kQuads * 4;
        if (m >= extents.m || n >= extents.n) {
            continue;
        }
        float* const to = partial + first * part_elems + std::int64_t{m} * pitch + n;
        const float* from = to;
        float v[4][4] = {};
        SIMT_UNROLL_BY_4
        for (int part = 0; part < count; ++part) {
            SIMT_UNROLL
            for (int j = 0; j < 4; ++j) {
                if (m + j * 8 < extents.m) {
                    const float4 quad = load4(from + std::int64_t{j} * 8 * pitch);
                    v[j][0] += quad.x;
                    v[j][1] += quad.y;
                    v[j][2] += quad.z;
                    v[j][3] += quad.w;
                }
            }
            from += step * part_elems;
        }
        if (!all) {
            SIMT_UNROLL
            for (int j = 0; j < 4; ++j) {
                if (m + j * 8 < extents.m) {
                    store4(to + std::int64_t{j} * 8 * pitch,
                           make_float4(v[j][0], v[j][1], v[j][2], v[j][3]));
                }
            }
            continue;
        }
        const float low[4][2] = {
            {v[0][0], v[0][1]}, {v[1][0], v[1][1]}, {v[2][0], v[2][1]}, {v[3][0], v[3][1]}};
        const float high[4][2] = {
            {v[0][2], v[0][3]}, {v[1][2], v[1][3]}, {v[2][2], v[2][3]}, {v[3][2], v[3][3]}};
        epilogue.template store<false>(m, n, low);
        if (n + 2 < extents.n) {
            epilogue.template store<false>(m, n + 2, high);
        }
    }
}

// Passes a thread's sums to the epilogue, or stores them in partial.
template <typename Tile, typename Sums, typename Epilogue, typename OfParts>
__device__ __forceinline__ void give_sums(const TensorExtents& extents, const Sums& sums,
                                          int first_m, int first_n, const Epilogue& epilogue,
                                          const OfParts& of_parts, float* partial,
                                          std::uint32_t* counts) {
    const bool whole = first_m + Tile::BM <= extents.m && first_n + Tile::BN <= extents.n;
    if (partial != nullptr) {
        const int pitch = partial_pitch(extents.n);
        float* const part = partial + std::int64_t{blockIdx.z} * extents.m * pitch;
        sums.for_each([&](int m, int n, const float(&v)[4][2]) {
            SIMT_UNROLL
            for (int j = 0; j < 4; ++j) {
                const int row = first_m + m + j * 8, column = first_n + n;
                if (row < extents.m && column < extents.n) {
                    Tf32Math::store_values(part + std::int64_t{row} * pitch + column, v[j][0],
                                           v[j][1]);
                }
            }
        });
        add_as_last(counts + static_cast<int>(blockIdx.x) * (extents.parts.groups + 1),
                    extents.parts, static_cast<int>(blockIdx.z),
                    [&](int first, int count, int step, bool all) {
                        add_tile_parts<Tile>(extents, first_m, first_n, partial, first, count, step,
                                             all, of_parts);
                    });
    } else if (whole) {
        sums.for_each([&](int m, int n, const float(&v)[4][2]) {
            epilogue.template store<true>(first_m + m, first_n + n, v);
        });
    } else {
        sums.for_each([&](int m, int n, const float(&v)[4][2]) {
            epilogue.template store<false>(first_m + m, first_n + n, v);
        });
    }
}

// partial [parts][m][partial_pitch(n)], whose sums go to of_parts, and counts [tiles][groups + 1];
// both null if the epilogue receives the sums directly.
template <typename Tile, typename Math, typename A, typename B, typename Epilogue, typename OfParts>
__global__ void __launch_bounds__(kTensorBlock, Tile::kBlocks)
    tensor_gemm_kernel(TensorExtents extents, A a, B b, Epilogue epilogue, OfParts of_parts,
                       float* partial, std::uint32_t* counts) {
    using Sums = TensorSums<Tile, Math, A, B>;
    using SliceA = typename Sums::SliceA;
    using SliceB = typename Sums::SliceB;
    constexpr int kStageBytes = SliceA::kBytes + SliceB::kBytes;
    constexpr int kStages = Tile::template kStages<kStageBytes>;
    SIMT_DYNAMIC_SHARED(unsigned char, stages);  // [kStages][kStageBytes]
    const int tile_m = static_cast<int>(blockIdx.x) / extents.tiles_n;
    const int first_m = tile_m * Tile::BM;
    const int first_n = (static_cast<int>(blockIdx.x) - tile_m * extents.tiles_n) * Tile::BN;
    const int begin = static_cast<int>(blockIdx.z) * extents.part_k;
    const int end = begin + extents.part_k < extents.k ? begin + extents.part_k : extents.k;
    const int slices = (end - begin + SliceA::kDepth - 1) / SliceA::kDepth;

    auto cursor_a = SliceA::cursor(a, first_m, begin, end);
    auto cursor_b = SliceB::cursor(b, first_n, begin, end);
    // Every slice is one group of copies. After the last slice, empty groups keep the number to
    // wait for constant.
    const auto fetch = [&](int slice, int stage) {
        if (slice < slices) {
            unsigned char* const to = stages + stage * kStageBytes;
            SliceA::fetch(a, cursor_a, to);
            SliceB::fetch(b, cursor_b, to + SliceA::kBytes);
        }
        cp_async_commit();
    };
    SIMT_UNROLL
    for (int stage = 0; stage < kStages - 1; ++stage) {
        fetch(stage, stage);
    }
    Sums sums;
    int stage = 0;
    for (int slice = 0; slice < slices; ++slice) {
        cp_async_wait<kStages - 2>();
        // All copies of this slice have arrived, and nobody reads the previous stage any more.
        __syncthreads();
        fetch(slice + kStages - 1, stage == 0 ? kStages - 1 : stage - 1);
        const unsigned char* const from = stages + stage * kStageBytes;
        sums.add(from, from + SliceA::kBytes);
        stage = stage == kStages - 1 ? 0 : stage + 1;
    }

    if constexpr (requires { typename Epilogue::TakesTile; }) {
        epilogue.template take_tile<Tile>(sums, first_m, first_n, stages);
    } else {
        give_sums<Tile>(extents, sums, first_m, first_n, epilogue, of_parts, partial, counts);
    }
}

// --- host side -----------------------------------------------------------------------------------

constexpr int tensor_tiles(int elems, int tile) {
    return (elems + tile - 1) / tile;
}

// The number of blocks to aim for by dividing k: enough for every existing GPU.
constexpr int kTensorBlocks = 256;
// A part has at least 8 slices; with fewer, adding the parts would cost more than it gains.
inline int tensor_most_parts(int k, int depth) {
    return std::max(1, k / (8 * depth));
}

// The number of partial sums that tensor_gemm needs for up to most_m rows.
inline std::int64_t tensor_partial_elems(int most_m, int n, int k, int depth) {
    const std::int64_t parts = std::min(tensor_most_parts(k, depth), kTensorBlocks);
    return parts == 1 ? 0
                      : std::min(parts * most_m * partial_pitch(n),
                                 std::int64_t{kTensorBlocks} * 128 * 128);
}

// True if there are enough tiles that k is not divided.
template <typename Tile>
bool tensor_tiles_suffice(int m, int n) {
    return std::int64_t{tensor_tiles(m, Tile::BM)} * tensor_tiles(n, Tile::BN) > kTensorBlocks / 2;
}

template <typename Tile, typename Math, typename A, typename B, typename Epilogue, typename OfParts>
bool run_tensor_gemm(const Context& context, const char* name, int m, int n, int k, const A& a,
                     const B& b, const Epilogue& epilogue, float* partial,
                     const OfParts& of_parts) {
    using Sums = TensorSums<Tile, Math, A, B>;
    constexpr int kDepth = Sums::SliceA::kDepth;
    const int tiles_m = tensor_tiles(m, Tile::BM), tiles_n = tensor_tiles(n, Tile::BN);
    const std::int64_t blocks = std::int64_t{tiles_m} * tiles_n;
    const auto wanted = static_cast<int>(std::min<std::int64_t>(
        tensor_most_parts(k, kDepth), std::max<std::int64_t>(1, kTensorBlocks / blocks)));
    const int part_k = tensor_tiles(tensor_tiles(k, wanted), kDepth) * kDepth;
    const int parts = tensor_tiles(k, part_k);
    const TensorExtents extents{m, n, k, part_k, part_groups(parts), tiles_n};
    partial = parts > 1 ? partial : nullptr;
    static_assert(2 * kTensorBlocks <= Workspace::kCounts);  // for tiles and their groups
    constexpr int kStageBytes = Sums::SliceA::kBytes + Sums::SliceB::kBytes;
    const SharedBytes shared{static_cast<std::size_t>(Tile::template kStages<kStageBytes>) *
                             kStageBytes};
    launch(name, tensor_gemm_kernel<Tile, Math, A, B, Epilogue, OfParts>,
           dim3(static_cast<unsigned>(blocks), 1, static_cast<unsigned>(parts)), dim3(kTensorBlock),
           shared, context.stream, extents, a, b, epilogue, of_parts, partial,
           context.workspace.counts());
    return partial != nullptr;
}

// m, n, k > 0. partial: tensor_partial_elems() floats. Returns whether k was divided; if so, the
// sums went to of_parts.
template <typename Math, typename A, typename B, typename Epilogue, typename OfParts>
bool tensor_gemm(const Context& context, const char* name, int m, int n, int k, const A& a,
                 const B& b, const Epilogue& epilogue, float* partial, const OfParts& of_parts) {
    if (m <= 64) {
        return run_tensor_gemm<TensorTile<64, 128>, Math>(context, name, m, n, k, a, b, epilogue,
                                                          partial, of_parts);
    }
    if (n <= 64) {
        return run_tensor_gemm<TensorTile<128, 64>, Math>(context, name, m, n, k, a, b, epilogue,
                                                          partial, of_parts);
    }
    return run_tensor_gemm<TensorTile<128, 128>, Math>(context, name, m, n, k, a, b, epilogue,
                                                       partial, of_parts);
}
template <typename Math, typename A, typename B, typename Epilogue>
void tensor_gemm(const Context& context, const char* name, int m, int n, int k, const A& a,
                 const B& b, const Epilogue& epilogue, float* partial) {
    tensor_gemm<Math>(context, name, m, n, k, a, b, epilogue, partial, epilogue);
}

}  // namespace gyre::SIMT_NAMESPACE
