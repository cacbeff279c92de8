// A tiled matrix product whose operands need not be stored matrices: c[m][n] = sum over k of
// a(m, k) * b(n, k). Linear layers and, as implicit GEMM, convolutions are instances.
//
// Block and grid: 256 threads compute a tile of BM x BN; grid (tiles of n, tiles of m, parts of k).
// k advances by 16; the next slice is fetched into registers while the current one, in shared
// memory as [k][m] and [k][n], is multiplied. FMA: a thread holds BM/16 x BN/16 sums. Tensor cores
// (TF32, mma.m16n8k8): a warp holds BM/2 x BN/4.
// If there are too few tiles to fill the GPU, k is divided among blocks ("split-K"), whose partial
// tiles a second kernel adds in a fixed order.
// FLOPs 2 M N K; bytes at least 4 (M K + N K + M N), plus re-reading by tiles of the other side.
//
// An operand has
//   kAlongK         whether its memory is contiguous along k, otherwise along rows; neighbouring
//                   threads fetch neighbouring elements
//   Row row(r)      data of row r (of m or n), kept in registers; r may be out of range
//   Slice slice(k)  data of k, which may be out of range
//   float at(row, slice)   the element, 0 if either is out of range
// An epilogue is called as epilogue(m, n, sum) for every element inside the matrix.
#pragma once

#include <algorithm>

#include "kernels/cuda/elementwise.cuh"
#include "kernels/cuda/kernels.hpp"
#include "kernels/cuda/simt.hpp"

namespace gyre::SIMT_NAMESPACE {

constexpr int kGemmBlock = 256;
constexpr int kGemmDepth = 16;  // of a slice, along k

template <int BM_, int BN_, bool kTensorCores_>
struct GemmTile {
    static constexpr int BM = BM_, BN = BN_;
    static constexpr bool kTensorCores = kTensorCores_;
    // Avoids bank conflicts within a warp: FMA reads 16 bytes per thread along m and n; a fragment
    // is 4 slices of k by 8 of m or n.
    static constexpr int kPad = kTensorCores ? 8 : 4;
    // Blocks per multiprocessor; more would leave a thread too few registers for its sums.
    static constexpr int kBlocks = BM * BN > 64 * 128 ? 1 : BM* BN > 32 * 32 ? 2 : 3;
};

struct GemmExtents {
    int m, n, k;
    int part_k;  // k per block; a multiple of kGemmDepth
    int parts;
};

// One thread's share of fetching a slice [kGemmDepth][kRows] of an operand.
template <typename Operand, int kRows>
class SliceLoader {
 public:
    static constexpr int kEach = kRows * kGemmDepth / kGemmBlock;
    static constexpr int kStep = Operand::kAlongK ? kGemmBlock / kGemmDepth : kGemmBlock / kRows;

    __device__ __forceinline__ SliceLoader(const Operand& operand, int first_row)
        : operand_(operand) {
        const int thread = static_cast<int>(threadIdx.x);
        row_ = Operand::kAlongK ? thread / kGemmDepth : thread % kRows;
        k_ = Operand::kAlongK ? thread % kGemmDepth : thread / kRows;
        for (int i = 0; i < kRowCount; ++i) {
            rows_[i] = operand.row(first_row + row_ + i * kStep);
        }
    }
    // `end`: the end of the block's part of k.
    __device__ __forceinline__ void fetch(int k, int end) {
        if constexpr (Operand::kAlongK) {
            const auto slice = operand_.slice(k + k_ < end ? k + k_ : -1);
            SIMT_UNROLL
            for (int i = 0; i < kEach; ++i) {
                value_[i] = operand_.at(rows_[i], slice);
            }
        } else {
            SIMT_UNROLL
            for (int i = 0; i < kEach; ++i) {
                const int at = k + k_ + i * kStep;
                value_[i] = operand_.at(rows_[0], operand_.slice(at < end ? at : -1));
            }
        }
    }
    template <typename Tile, int kPitch>
    __device__ __forceinline__ void store(float (&slice)[kGemmDepth][kPitch]) const {
        SIMT_UNROLL
        for (int i = 0; i < kEach; ++i) {
            const int row = Operand::kAlongK ? row_ + i * kStep : row_;
            const int k = Operand::kAlongK ? k_ : k_ + i * kStep;
            float value = value_[i];
            if constexpr (Tile::kTensorCores) {
                const std::uint32_t bits = to_tf32(value);
                memcpy(&value, &bits, sizeof value);
            }
            slice[k][row] = value;
        }
    }

 private:
    static constexpr int kRowCount = Operand::kAlongK ? kEach : 1;
    const Operand& operand_;
    int row_, k_;
    typename Operand::Row rows_[kRowCount];
    float value_[kEach];
};

// One thread's sums, and their positions in the tile.
template <typename Tile>
class FmaSums {
 public:
    static constexpr int kM = Tile::BM / 16, kN = Tile::BN / 16;

    template <int kPitchM, int kPitchN>
    __device__ __forceinline__ void add(const float (&a)[kGemmDepth][kPitchM],
                                        const float (&b)[kGemmDepth][kPitchN]) {
        SIMT_UNROLL
        for (int k = 0; k < kGemmDepth; ++k) {
            float row[kM], column[kN];
            read<kM>(a[k], static_cast<int>(threadIdx.x) / 16, row);
            read<kN>(b[k], static_cast<int>(threadIdx.x) % 16, column);
            SIMT_UNROLL
            for (int i = 0; i < kM; ++i) {
                SIMT_UNROLL
                for (int j = 0; j < kN; ++j) {
                    sum_[i][j] += row[i] * column[j];
                }
            }
        }
    }
    // Calls body(m, n, sum) for each sum, with m and n relative to the tile's corner.
    template <typename Body>
    __device__ __forceinline__ void for_each(Body body) const {
        SIMT_UNROLL
        for (int i = 0; i < kM; ++i) {
            SIMT_UNROLL
            for (int j = 0; j < kN; ++j) {
                body(place<kM>(static_cast<int>(threadIdx.x) / 16, i),
                     place<kN>(static_cast<int>(threadIdx.x) % 16, j), sum_[i][j]);
            }
        }
    }

 private:
    // A thread has groups of up to four neighbours, 64 apart: 16-byte accesses without conflicts.
    template <int kCount>
    static __device__ __forceinline__ int place(int thread, int i) {
        constexpr int kGroup = kCount < 4 ? kCount : 4;
        return i / kGroup * 64 + thread * kGroup + i % kGroup;
    }
    template <int kCount>
    static __device__ __forceinline__ void read(const float* from, int thread,
                                                float (&values)[kCount]) {
        if constexpr (kCount < 4) {
            SIMT_UNROLL
            for (int i = 0; i < kCount; ++i) {
                values[i] = from[place<kCount>(thread, i)];
            }
        } else {
            SIMT_UNROLL
            for (int i = 0; i < kCount; i += 4) {
                read4(from + place<kCount>(thread, i), values + i);
            }
        }
    }

    float sum_[kM][kN] = {};
};

// The same on tensor cores: the warps divide the tile 2 (m) x 4 (n).
template <typename Tile>
class MmaSums {
 public:
    static constexpr int kM = Tile::BM / 32, kN = Tile::BN / 32;  // in units of 16 and of 8

    template <int kPitchM, int kPitchN>
    __device__ __forceinline__ void add(const float (&a)[kGemmDepth][kPitchM],
                                        const float (&b)[kGemmDepth][kPitchN]) {
        const int group = lane() / 4, at = lane() % 4;
        SIMT_UNROLL
        for (int k = 0; k < kGemmDepth; k += 8) {
            std::uint32_t fragment_a[kM][4], fragment_b[kN][2];
            SIMT_UNROLL
            for (int i = 0; i < kM; ++i) {
                const int m = first_m() + i * 16 + group;
                fragment_a[i][0] = bits(a[k + at][m]);
                fragment_a[i][1] = bits(a[k + at][m + 8]);
                fragment_a[i][2] = bits(a[k + at + 4][m]);
                fragment_a[i][3] = bits(a[k + at + 4][m + 8]);
            }
            SIMT_UNROLL
            for (int j = 0; j < kN; ++j) {
                const int n = first_n() + j * 8 + group;
                fragment_b[j][0] = bits(b[k + at][n]);
                fragment_b[j][1] = bits(b[k + at + 4][n]);
            }
            SIMT_UNROLL
            for (int i = 0; i < kM; ++i) {
                SIMT_UNROLL
                for (int j = 0; j < kN; ++j) {
                    mma_tf32(sum_[i][j], fragment_a[i], fragment_b[j]);
                }
            }
        }
    }
    template <typename Body>
    __device__ __forceinline__ void for_each(Body body) const {
        SIMT_UNROLL
        for (int i = 0; i < kM; ++i) {
            SIMT_UNROLL
            for (int j = 0; j < kN; ++j) {
                SIMT_UNROLL
                for (int e = 0; e < 4; ++e) {
                    body(first_m() + i * 16 + lane() / 4 + e / 2 * 8,
                         first_n() + j * 8 + lane() % 4 * 2 + e % 2, sum_[i][j][e]);
                }
            }
        }
    }

 private:
    static __device__ __forceinline__ int lane() { return static_cast<int>(threadIdx.x) % 32; }
    static __device__ __forceinline__ int first_m() {
        return static_cast<int>(threadIdx.x) / 128 * (Tile::BM / 2);
    }
    static __device__ __forceinline__ int first_n() {
        return static_cast<int>(threadIdx.x) / 32 % 4 * (Tile::BN / 4);
    }
    static __device__ __forceinline__ std::uint32_t bits(float value) {
        std::uint32_t result;
        memcpy(&result, &value, sizeof result);
        return result;
    }

    float sum_[kM][kN][4] = {};
};

// partial [parts][m][n], or null if the epilogue receives the sums directly.
template <typename Tile, typename A, typename B, typename Epilogue>
__global__ void __launch_bounds__(kGemmBlock, Tile::kBlocks)
    gemm_kernel(GemmExtents extents, A a, B b, Epilogue epilogue, float* partial) {
    SIMT_SHARED(float, slice_a, [2][kGemmDepth][Tile::BM + Tile::kPad]);
    SIMT_SHARED(float, slice_b, [2][kGemmDepth][Tile::BN + Tile::kPad]);
    const int first_m = static_cast<int>(blockIdx.y) * Tile::BM;
    const int first_n = static_cast<int>(blockIdx.x) * Tile::BN;
    const int begin = static_cast<int>(blockIdx.z) * extents.part_k;
    const int end = begin + extents.part_k < extents.k ? begin + extents.part_k : extents.k;

    SliceLoader<A, Tile::BM> load_a(a, first_m);
    SliceLoader<B, Tile::BN> load_b(b, first_n);
    std::conditional_t<Tile::kTensorCores, MmaSums<Tile>, FmaSums<Tile>> sums;
    load_a.fetch(begin, end);
    load_b.fetch(begin, end);
    load_a.template store<Tile>(slice_a[0]);
    load_b.template store<Tile>(slice_b[0]);
    __syncthreads();
    int current = 0;
    for (int k = begin; k < end; k += kGemmDepth) {
        const bool more = k + kGemmDepth < end;
        if (more) {
            load_a.fetch(k + kGemmDepth, end);
            load_b.fetch(k + kGemmDepth, end);
        }
        sums.add(slice_a[current], slice_b[current]);
        if (more) {
            // All reads of the other buffer precede the last barrier.
            load_a.template store<Tile>(slice_a[current ^ 1]);
            load_b.template store<Tile>(slice_b[current ^ 1]);
        }
        __syncthreads();
        current ^= 1;
    }
    sums.for_each([&](int m, int n, float sum) {
        m += first_m;
        n += first_n;
        if (m < extents.m && n < extents.n) {
            if (partial == nullptr) {
                epilogue(m, n, sum);
            } else {
                partial[(std::int64_t{blockIdx.z} * extents.m + m) * extents.n + n] = sum;
            }
        }
    });
}

// Adds the parts in order. One thread per element; grid-stride.
template <typename Epilogue>
__global__ void gemm_add_parts_kernel(GemmExtents extents, const float* partial,
                                      Epilogue epilogue) {
    const std::int64_t elems = std::int64_t{extents.m} * extents.n;
    const std::int64_t threads = std::int64_t{gridDim.x} * blockDim.x;
    for (std::int64_t i = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < elems;
         i += threads) {
        float sum = 0.0f;
        for (int part = 0; part < extents.parts; ++part) {
            sum += partial[part * elems + i];
        }
        epilogue(static_cast<int>(i / extents.n), static_cast<int>(i % extents.n), sum);
    }
}

// The least number of blocks to aim for by dividing k.
constexpr std::int64_t kGemmWantedBlocks = std::int64_t{kPlannedMultiprocessors} * 2;

// An upper bound on workspace, as k is only divided until there are enough blocks.
constexpr std::size_t kGemmWorkspaceBytes =
    static_cast<std::size_t>(kGemmWantedBlocks) * 128 * 128 * sizeof(float);

template <typename Tile, typename A, typename B, typename Epilogue>
void run_gemm(const Context& context, const char* name, int m, int n, int k, const A& a, const B& b,
              const Epilogue& epilogue) {
    const auto tiles = [](int elems, int tile) { return (elems + tile - 1) / tile; };
    const int tiles_m = tiles(m, Tile::BM), tiles_n = tiles(n, Tile::BN);
    const std::int64_t blocks = std::int64_t{tiles_m} * tiles_n;
    // A part has at least 8 slices; with fewer, adding the parts would cost more than it gains.
    const std::int64_t most_parts = std::max(1, k / (8 * kGemmDepth));
    const std::int64_t wanted = std::max<std::int64_t>(1, kGemmWantedBlocks / blocks);
    GemmExtents extents{m, n, k, 0, static_cast<int>(std::min(most_parts, wanted))};
    extents.part_k = tiles(tiles(k, extents.parts), kGemmDepth) * kGemmDepth;
    extents.parts = std::max(1, tiles(k, extents.part_k));
    float* partial =
        extents.parts > 1 ? context.workspace.floats(std::int64_t{extents.parts} * m * n) : nullptr;
    launch(name, gemm_kernel<Tile, A, B, Epilogue>,
           dim3(static_cast<unsigned>(tiles_n), static_cast<unsigned>(tiles_m),
                static_cast<unsigned>(extents.parts)),
           dim3(kGemmBlock), context.stream, extents, a, b, epilogue, partial);
    if (partial != nullptr) {
        const std::int64_t add_blocks = (std::int64_t{m} * n + kGemmBlock - 1) / kGemmBlock;
        launch(name, gemm_add_parts_kernel<Epilogue>,
               dim3(static_cast<unsigned>(
                   std::min<std::int64_t>(add_blocks, context.multiprocessors * 32))),
               dim3(kGemmBlock), context.stream, extents, partial, epilogue);
    }
}

// Chooses the largest tile that leaves enough blocks and does not waste work on small matrices.
template <typename A, typename B, typename Epilogue>
void gemm(const Context& context, const char* name, int m, int n, int k, const A& a, const B& b,
          const Epilogue& epilogue) {
    if (context.tf32 && n > 32 && k >= 32) {
        return m > 64 ? run_gemm<GemmTile<128, 128, true>>(context, name, m, n, k, a, b, epilogue)
                      : run_gemm<GemmTile<64, 128, true>>(context, name, m, n, k, a, b, epilogue);
    }
    const auto blocks = [&](int tile) {
        return std::int64_t{(m + tile - 1) / tile} * ((n + tile - 1) / tile);
    };
    // Parts of k, of at least 8 slices each, also count as blocks.
    const std::int64_t parts = std::max(1, k / (8 * kGemmDepth));
    if (m > 64 && n > 64 && blocks(128) * parts >= kPlannedMultiprocessors) {
        return run_gemm<GemmTile<128, 128, false>>(context, name, m, n, k, a, b, epilogue);
    }
    if (m > 32 && n > 32 && blocks(64) * parts >= kPlannedMultiprocessors) {
        return run_gemm<GemmTile<64, 64, false>>(context, name, m, n, k, a, b, epilogue);
    }
    return run_gemm<GemmTile<32, 32, false>>(context, name, m, n, k, a, b, epilogue);
}

// A stored matrix: element (row, k) at row * row_stride + k * k_stride. Row `ones`, if there is
// one, is all ones, so that a weight gradient's product also yields the bias gradient.
template <bool kAlongK_>
struct DenseOperand {
    static constexpr bool kAlongK = kAlongK_;
    struct Row {
        std::int64_t offset;
        bool valid, one;
    };
    struct Slice {
        std::int64_t offset;
        bool valid;
    };
    const float* matrix;
    int rows;
    std::int64_t row_stride, k_stride;
    int ones = -1;

    __device__ __forceinline__ Row row(int r) const {
        return {r * row_stride, r < rows, r == ones};
    }
    __device__ __forceinline__ Slice slice(int k) const { return {k * k_stride, k >= 0}; }
    __device__ __forceinline__ float at(const Row& r, const Slice& s) const {
        const float other = r.one && s.valid ? 1.0f : 0.0f;
        return r.valid && s.valid ? matrix[r.offset + s.offset] : other;
    }
};

// The epilogue of a weight gradient: column `columns`, from the row of ones, is the bias gradient.
struct StoreGradients {
    float *dw, *db;
    int columns;
    __device__ __forceinline__ void operator()(int m, int n, float sum) const {
        if (n < columns) {
            dw[std::int64_t{m} * columns + n] = sum;
        } else {
            db[m] = sum;
        }
    }
};

}  // namespace gyre::SIMT_NAMESPACE
