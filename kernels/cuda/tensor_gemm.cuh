// The matrix product on tensor cores: c[m][n] = sum over k of a(m, k) * b(n, k), operands in TF32
// (float32 in memory) or 16 bits, sums in float32.
//
// Block and grid: 128 threads, 2 x 2 warps, compute a tile of BM x BN, a warp a quarter of it;
// grid (tiles of n, then of m; 1; parts of k). k advances by 128 bytes. Slices come by cp.async,
// kStages of them in shared memory, of which one is multiplied while the others are on their way.
// Too few tiles for a GPU divide k among blocks, of which the last to finish add the partial tiles,
// in a fixed order (part_sums.cuh). How many parts follows from the shape alone: every GPU gets the
// same bits.
// FLOPs 2 M N K; bytes at least (M K + N K) times the element's and 4 M N, times re-reading by
// tiles of the other side.
//
// In shared memory an operand that is contiguous along k lies in rows of one m or n, one that is
// contiguous across k in rows of one k. The 16-byte chunks of a row are permuted by the row, so
// that reads, as the copies, meet each bank once. ldmatrix reads what is contiguous along k, and 16
// bits across k, which it transposes; words of TF32 across k are read one by one. Floats that
// 16-bit tensor cores multiply, such as a layer's fp32 weights, are rounded as they are read.
//
// An operand (tensor_operands.cuh) has
//   Elem      in memory; floats do for every Math
//   kAlongK   whether it is contiguous along k
//   kRound    whether floats are still to be rounded to TF32, where that is what is multiplied
//   Cursor<kEach, kStep, kDepth>(operand, row, k, end)   what one thread copies of each slice:
//             along k, the chunk at k of rows row + i * kStep, i < kEach; across k, the chunk at
//             row of k + i * kStep. `end`: of the block's part of k.
//   cursor.fetch(operand, copy)   calls copy(i, from, valid) for each i, and goes on by kDepth
//             of k
// An epilogue has store<kWhole>(m, n, v): v[j] are the sums of row m + 8 j and columns n, n + 1;
// n is even, m % 32 < 8. kWhole: all of them are inside the matrix, else the epilogue has to look.
// Where it has a type TakesTile, a whole block calls take_tile<Tile>(sums, first_m, first_n,
// stages) instead, whose stages others may still be reading; k is then not divided.
#pragma once

#include <algorithm>

#include "kernels/cuda/elementwise.cuh"
#include "kernels/cuda/kernels.hpp"
#include "kernels/cuda/part_sums.cuh"
#include "kernels/cuda/simt.hpp"
#include "kernels/cuda/tensor_math.cuh"

namespace gyre::SIMT_NAMESPACE {

constexpr int kTensorBlock = 128;
constexpr int kSliceBytes = 128;  // of k
constexpr int kBandRows = 32;     // of m, that epilogues get at a time, over the threads of a warp

template <int BM_, int BN_>
struct TensorTile {
    static constexpr int BM = BM_, BN = BN_;
    // Two blocks share a multiprocessor's registers, and its shared memory where it has 227 KiB. No
    // GPU since sm_80 has less than 99 KiB for one.
    static constexpr int kBlocks = 2;
    template <int kStageBytes>
    static constexpr int kStages = (96 << 10) / kStageBytes < 4 ? (96 << 10) / kStageBytes : 4;
};

struct TensorExtents {
    int m, n, k;
    int part_k;  // of k, of one block; a multiple of a slice
    PartGroups parts;
    int tiles_n;
};

// The bits that the hardware, which ignores the 13 low ones, takes for the nearest number of TF32;
// ties away from zero. One instruction on sm_90. NaN stays NaN: of positive ones, such as all
// arithmetic of a GPU yields, the sum would be negative; of negative ones only those overflow that
// have 11 leading ones, which not even a host computes.
__device__ __forceinline__ std::uint32_t nearest_tf32(std::uint32_t bits) {
    const auto rounded = static_cast<std::int32_t>(bits + 0x1000u);
    const auto cut = static_cast<std::int32_t>(bits);
    return static_cast<std::uint32_t>(rounded > cut ? rounded : cut);
}

// A slice of an operand in shared memory: kRows of m or n by kDepth of k.
template <typename Math, typename Operand, int kRows>
struct OperandSlice {
    static constexpr bool kAlongK = Operand::kAlongK;
    static constexpr int kElemBytes = sizeof(typename Operand::Elem);
    static constexpr int kDepth = kSliceBytes / static_cast<int>(sizeof(typename Math::Elem));
    static constexpr bool kNarrow = kElemBytes > static_cast<int>(sizeof(typename Math::Elem));
    static constexpr int kChunk = 16 / kElemBytes;
    static constexpr int kPitch = (kAlongK ? kDepth : kRows) * kElemBytes;
    static constexpr int kBytes = kRows * kDepth * kElemBytes;

    // How threads share the copies.
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
            const int turn = turned(i * kStep) * 16;  // of the rows i * kStep apart
            cp_async16(slice + ((at ^ turn) + i * (kStep * kPitch)), from, valid);
        });
    }

    // Fragments of rows `first` and the following kCount * 16 at step kk of the slice, as words:
    // [i][0] rows 0-7, first half of the step's k; [i][1], [i][2] rows 8-15 and the second half, in
    // the order of mma's a (kRowsFirst) or, of two b, the other way round; [i][3] both.
    template <int kCount, bool kRowsFirst>
    static __device__ __forceinline__ void fragments(const unsigned char* slice, int first, int kk,
                                                     std::uint32_t (&words)[kCount][4]) {
        const int lane = static_cast<int>(threadIdx.x) % 32;
        if constexpr (!kNarrow && (kAlongK || kElemBytes == 2)) {
            // Matrix lane / 8; its 8 rows, or where k goes across, its 8 of k.
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
    // How a row's chunks are permuted.
    static constexpr __device__ int turned(int row) {
        return kNarrow                      ? (kAlongK ? row : row / 2) % 4 * 2
               : kAlongK || kElemBytes == 2 ? row % 8
                                            : row % 4 * 2;
    }
    // What a lane has of the 8 rows from `row` on and half a step of k: one k of TF32, or two of 16
    // bits that are floats still. `row` is a multiple of 8.
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

// The sums of one thread: its warp's quarter of the tile, in fragments of 16 x 8.
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
    // Calls body(m, n, v) as epilogues are called, m and n counted from the tile's corner.
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

// Of a row of partial sums: a multiple of 16 bytes.
__device__ __host__ __forceinline__ int partial_pitch(int n) {
    return (n + 3) / 4 * 4;
}

// Adds parts of a tile, as add_as_last asks for it. A thread has four rows of a band and four
// columns at a time, neighbours along n.
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

// The sums, as a thread has them, to the epilogue or into partial.
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

// partial [parts][m][partial_pitch(n)], whose sums of_parts gets, and counts [tiles][groups + 1];
// or null where the epilogue gets the sums at once.
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
    // Every slice is a group of copies; behind the last one groups are empty, so that the count to
    // wait for stays the same.
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
        // Everybody's copies of this slice are there, and nobody reads the stage before any more.
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

// --- the host's side -----------------------------------------------------------------------------

constexpr int tensor_tiles(int elems, int tile) {
    return (elems + tile - 1) / tile;
}

// Blocks that are wanted at least, where k can be divided to get them: enough for every GPU there
// is.
constexpr int kTensorBlocks = 256;
// A part has at least 8 slices, or adding the parts costs more than it gains.
inline int tensor_most_parts(int k, int depth) {
    return std::max(1, k / (8 * depth));
}

// Of partial sums that tensor_gemm needs for up to most_m rows.
inline std::int64_t tensor_partial_elems(int most_m, int n, int k, int depth) {
    const std::int64_t parts = std::min(tensor_most_parts(k, depth), kTensorBlocks);
    return parts == 1 ? 0
                      : std::min(parts * most_m * partial_pitch(n),
                                 std::int64_t{kTensorBlocks} * 128 * 128);
}

// Whether there are so many tiles that k is not divided.
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
    static_assert(2 * kTensorBlocks <= Workspace::kCounts);  // of tiles and their groups
    constexpr int kStageBytes = Sums::SliceA::kBytes + Sums::SliceB::kBytes;
    const SharedBytes shared{static_cast<std::size_t>(Tile::template kStages<kStageBytes>) *
                             kStageBytes};
    launch(name, tensor_gemm_kernel<Tile, Math, A, B, Epilogue, OfParts>,
           dim3(static_cast<unsigned>(blocks), 1, static_cast<unsigned>(parts)), dim3(kTensorBlock),
           shared, context.stream, extents, a, b, epilogue, of_parts, partial,
           context.workspace.counts());
    return partial != nullptr;
}

// m, n, k > 0. partial: tensor_partial_elems() floats. Returns whether k was divided; the sums then
// went to of_parts.
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
