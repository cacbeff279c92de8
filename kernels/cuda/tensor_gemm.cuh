// The matrix product on tensor cores: c[m][n] = sum over k of a(m, k) * b(n, k), operands in TF32
// (float32 in memory) or 16 bits, sums in float32.
//
// Block and grid: 128 threads, 2 x 2 warps, compute a tile of BM x BN, a warp a quarter of it;
// grid (tiles of n, then of m; 1; parts of k). k advances by 128 bytes. Slices come by cp.async,
// kStages of them in shared memory, of which one is multiplied while the others are on their way.
// Too few tiles for a GPU divide k among blocks, whose partial tiles a second kernel adds in a
// fixed order. How many parts follows from the shape alone: every GPU gets the same bits.
// FLOPs 2 M N K; bytes at least (M K + N K) times the element's and 4 M N, times re-reading by
// tiles of the other side.
//
// In shared memory an operand that is contiguous along k lies in rows of 128 bytes, one of m or n,
// whose 16-byte chunks are permuted by the row (chunk ^= row % 8): ldmatrix, as the copies, meets
// each bank once. One that is contiguous across k lies in rows of one k, padded likewise: 16 bits
// are transposed by ldmatrix, words of TF32 are read one by one.
//
// An operand (tensor_operands.cuh) has
//   kAlongK   whether it is contiguous along k
//   kRound    whether it is still to be rounded to TF32
//   Cursor<kEach, kStep, kDepth>(operand, row, k, end)   what one thread copies of each slice:
//             along k, the chunk at k of rows row + i * kStep, i < kEach; across k, the chunk at
//             row of k + i * kStep. `end`: of the block's part of k.
//   cursor.fetch(operand, copy)   calls copy(i, from, valid) for each i, and goes on by kDepth
//             of k
// An epilogue has store<kWhole>(m, n, v): v[j] are the sums of row m + 8 j and columns n, n + 1;
// n is even, m % 32 < 8. kWhole: all of them are inside the matrix, else the epilogue has to look.
#pragma once

#include <algorithm>

#include "kernels/cuda/elementwise.cuh"
#include "kernels/cuda/kernels.hpp"
#include "kernels/cuda/simt.hpp"

namespace gyre::SIMT_NAMESPACE {

constexpr int kTensorBlock = 128;
constexpr int kSliceBytes = 128;  // of k
constexpr int kBandRows = 32;     // of m, that epilogues get at a time, over the threads of a warp

struct Tf32Math {
    static constexpr int kElemBytes = 4;
    static __device__ __forceinline__ void multiply(float (&d)[4], const std::uint32_t (&a)[4],
                                                    const std::uint32_t (&b)[2]) {
        mma_tf32(d, a, b);
    }
};
struct Bf16Math {
    static constexpr int kElemBytes = 2;
    static __device__ __forceinline__ void multiply(float (&d)[4], const std::uint32_t (&a)[4],
                                                    const std::uint32_t (&b)[2]) {
        mma_bf16(d, a, b);
    }
};
struct F16Math {
    static constexpr int kElemBytes = 2;
    static __device__ __forceinline__ void multiply(float (&d)[4], const std::uint32_t (&a)[4],
                                                    const std::uint32_t (&b)[2]) {
        mma_f16(d, a, b);
    }
};

template <int BM_, int BN_>
struct TensorTile {
    static constexpr int BM = BM_, BN = BN_;
    // Two blocks share the 227 KiB of a multiprocessor, and its registers.
    static constexpr int kStages = BM * BN > 64 * 128 ? 3 : 4;
    static constexpr int kBlocks = 2;
};

struct TensorExtents {
    int m, n, k;
    int part_k;  // of k, of one block; a multiple of a slice
    int parts;
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

// A slice of an operand in shared memory: kRows of m or n by 128 bytes of k.
template <typename Math, typename Operand, int kRows>
struct OperandSlice {
    static constexpr bool kAlongK = Operand::kAlongK;
    static constexpr int kElemBytes = Math::kElemBytes;
    static constexpr int kChunk = 16 / kElemBytes;
    static constexpr int kDepth = kSliceBytes / kElemBytes;
    static constexpr int kPitch =
        kAlongK ? kSliceBytes : kRows * kElemBytes + (kElemBytes == 4 ? 32 : 16);
    static constexpr int kBytes = (kAlongK ? kRows : kDepth) * kPitch;

    // How threads share the copies.
    static constexpr int kRowChunks = kAlongK ? 8 : kRows / kChunk;
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
        unsigned char* const to = slice + row * kPitch + (kAlongK ? chunk ^ (row % 8) : chunk) * 16;
        cursor.fetch(operand, [&](int i, const void* from, bool valid) {
            cp_async16(to + i * (kStep * kPitch), from, valid);
        });
    }

    // Fragments of rows `first` and the following kCount * 16 at step kk of the slice, as words:
    // [i][0] rows 0-7, first half of the step's k; [i][1], [i][2] rows 8-15 and the second half, in
    // the order of mma's a (kRowsFirst) or, of two b, the other way round; [i][3] both.
    template <int kCount, bool kRowsFirst>
    static __device__ __forceinline__ void fragments(const unsigned char* slice, int first, int kk,
                                                     std::uint32_t (&words)[kCount][4]) {
        const int lane = static_cast<int>(threadIdx.x) % 32;
        if constexpr (kAlongK || kElemBytes == 2) {
            // Matrix lane / 8; its 8 rows, or where k goes across, its 8 of k.
            const int low = lane / 8 % 2, high = lane / 16;
            const int rows8 = kRowsFirst ? low : high, k8 = kRowsFirst ? high : low;
            SIMT_UNROLL
            for (int i = 0; i < kCount; ++i) {
                if constexpr (kAlongK) {
                    const int swizzled = (k8 ^ lane % 8) * 16 ^ kk * 32;
                    ldmatrix_x4(words[i], slice + (first + rows8 * 8 + lane % 8) * kPitch +
                                              swizzled + i * 16 * kPitch);
                } else {
                    ldmatrix_x4_transposed(words[i], slice +
                                                         (kk * 16 + k8 * 8 + lane % 8) * kPitch +
                                                         (first + rows8 * 8) * 2 + i * 16 * 2);
                }
            }
        } else {
            const unsigned char* const from =
                slice + (kk * 8 + lane % 4) * kPitch + (first + lane / 4) * 4;
            SIMT_UNROLL
            for (int i = 0; i < kCount; ++i) {
                SIMT_UNROLL
                for (int j = 0; j < 4; ++j) {
                    const int rows8 = kRowsFirst ? j % 2 : j / 2, k4 = kRowsFirst ? j / 2 : j % 2;
                    words[i][j] = *reinterpret_cast<const std::uint32_t*>(from + k4 * 4 * kPitch +
                                                                          (i * 16 + rows8 * 8) * 4);
                }
            }
        }
        if constexpr (Operand::kRound) {
            SIMT_UNROLL
            for (int i = 0; i < kCount; ++i) {
                SIMT_UNROLL
                for (int j = 0; j < 4; ++j) {
                    words[i][j] = nearest_tf32(words[i][j]);
                }
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

__device__ __forceinline__ void store_pair(float* at, float first, float second) {
    float2 pair;
    pair.x = first;
    pair.y = second;
    store_vector(at, pair);
}

// Of a row of partial sums: even, so that pairs are aligned.
__device__ __host__ __forceinline__ int partial_pitch(int n) {
    return (n + 1) / 2 * 2;
}

// partial [parts][m][partial_pitch(n)], or null where the epilogue gets the sums at once.
template <typename Tile, typename Math, typename A, typename B, typename Epilogue>
__global__ void __launch_bounds__(kTensorBlock, Tile::kBlocks)
    tensor_gemm_kernel(TensorExtents extents, A a, B b, Epilogue epilogue, float* partial) {
    using Sums = TensorSums<Tile, Math, A, B>;
    using SliceA = typename Sums::SliceA;
    using SliceB = typename Sums::SliceB;
    constexpr int kStages = Tile::kStages, kStageBytes = SliceA::kBytes + SliceB::kBytes;
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

    const bool whole = first_m + Tile::BM <= extents.m && first_n + Tile::BN <= extents.n;
    if (partial != nullptr) {
        const int pitch = partial_pitch(extents.n);
        float* const part = partial + std::int64_t{blockIdx.z} * extents.m * pitch;
        sums.for_each([&](int m, int n, const float(&v)[4][2]) {
            SIMT_UNROLL
            for (int j = 0; j < 4; ++j) {
                const int row = first_m + m + j * 8, column = first_n + n;
                if (row < extents.m && column < extents.n) {
                    store_pair(part + std::int64_t{row} * pitch + column, v[j][0], v[j][1]);
                }
            }
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

// Adds the parts, in their order. One thread has four rows of a band and two columns, neighbours
// along n.
template <typename Epilogue>
__global__ void __launch_bounds__(kElementwiseBlock)
    tensor_add_parts_kernel(TensorExtents extents, const float* partial, Epilogue epilogue) {
    const int pitch = partial_pitch(extents.n), pairs = pitch / 2;
    const std::int64_t index = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
    const int band = static_cast<int>(index / pairs), column = static_cast<int>(index % pairs) * 2;
    const int first = band / 8 * kBandRows + band % 8;
    if (first >= extents.m) {
        return;
    }
    const std::int64_t part_elems = std::int64_t{extents.m} * pitch;
    const float* from = partial + std::int64_t{first} * pitch + column;
    float v[4][2] = {};
    for (int part = 0; part < extents.parts; ++part) {
        SIMT_UNROLL
        for (int j = 0; j < 4; ++j) {
            if (first + j * 8 < extents.m) {
                const float2 pair = load_vector<float2>(from + std::int64_t{j} * 8 * pitch);
                v[j][0] += pair.x;
                v[j][1] += pair.y;
            }
        }
        from += part_elems;
    }
    epilogue.template store<false>(first, column, v);
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

template <typename Tile, typename Math, typename A, typename B, typename Epilogue>
void run_tensor_gemm(const Context& context, const char* name, int m, int n, int k, const A& a,
                     const B& b, const Epilogue& epilogue, float* partial) {
    using Sums = TensorSums<Tile, Math, A, B>;
    constexpr int kDepth = Sums::SliceA::kDepth;
    const int tiles_m = tensor_tiles(m, Tile::BM), tiles_n = tensor_tiles(n, Tile::BN);
    const std::int64_t blocks = std::int64_t{tiles_m} * tiles_n;
    TensorExtents extents{m, n, k, 0, 0, tiles_n};
    extents.parts = static_cast<int>(std::min<std::int64_t>(
        tensor_most_parts(k, kDepth), std::max<std::int64_t>(1, kTensorBlocks / blocks)));
    extents.part_k = tensor_tiles(tensor_tiles(k, extents.parts), kDepth) * kDepth;
    extents.parts = tensor_tiles(k, extents.part_k);
    partial = extents.parts > 1 ? partial : nullptr;
    const SharedBytes shared{static_cast<std::size_t>(Tile::kStages) *
                             (Sums::SliceA::kBytes + Sums::SliceB::kBytes)};
    launch(name, tensor_gemm_kernel<Tile, Math, A, B, Epilogue>,
           dim3(static_cast<unsigned>(blocks), 1, static_cast<unsigned>(extents.parts)),
           dim3(kTensorBlock), shared, context.stream, extents, a, b, epilogue, partial);
    if (partial != nullptr) {
        const std::int64_t threads =
            std::int64_t{tensor_tiles(m, kBandRows)} * 8 * (partial_pitch(n) / 2);
        launch(name, tensor_add_parts_kernel<Epilogue>,
               dim3(static_cast<unsigned>((threads + kElementwiseBlock - 1) / kElementwiseBlock)),
               dim3(kElementwiseBlock), context.stream, extents, static_cast<const float*>(partial),
               epilogue);
    }
}

// m, n, k > 0. partial: tensor_partial_elems() floats.
template <typename Math, typename A, typename B, typename Epilogue>
void tensor_gemm(const Context& context, const char* name, int m, int n, int k, const A& a,
                 const B& b, const Epilogue& epilogue, float* partial) {
    if (m <= 64) {
        return run_tensor_gemm<TensorTile<64, 128>, Math>(context, name, m, n, k, a, b, epilogue,
                                                          partial);
    }
    if (n <= 64) {
        return run_tensor_gemm<TensorTile<128, 64>, Math>(context, name, m, n, k, a, b, epilogue,
                                                          partial);
    }
    run_tensor_gemm<TensorTile<128, 128>, Math>(context, name, m, n, k, a, b, epilogue, partial);
}

}  // namespace gyre::SIMT_NAMESPACE
