// An epilogue that updates a layer's weights and bias directly from the sums that are their
// gradients, which are never stored: dw [out][in], and db in the column after the last.
//
// A block's sums go to shared memory, from where a warp takes whole rows of the tile, 16 bytes per
// thread, kRows of them at a time; all are loaded before any is stored, to hide memory latency.
// Bytes per element, read and written: those of the rule (optimizers.cu) without the gradient's 4.
#pragma once

#include "kernels/cuda/optimizers.cuh"
#include "kernels/cuda/tensor_gemm.cuh"

namespace gyre::SIMT_NAMESPACE {

template <typename Update>
struct UpdateWeights {
    using TakesTile = void;
    Update update;
    std::int64_t bias;  // offset of b from w
    int out, in;

    template <typename Tile, typename Sums>
    __device__ __forceinline__ void take_tile(const Sums& sums, int first_m, int first_n,
                                              unsigned char* stages) const {
        // Eight rows of four pairs, stored by a warp at once, start in banks 8 words apart.
        constexpr int kPitch = Tile::BN + 8;
        constexpr int kStageBytes = Sums::SliceA::kBytes + Sums::SliceB::kBytes;
        static_assert(Tile::BM * kPitch * 4 <= Tile::template kStages<kStageBytes> * kStageBytes);
        float* const tile = reinterpret_cast<float*>(stages);
        __syncthreads();  // the last slice has been read
        sums.for_each([&](int m, int n, const float(&v)[4][2]) {
            SIMT_UNROLL
            for (int j = 0; j < 4; ++j) {
                Tf32Math::store_values(tile + (m + j * 8) * kPitch + n, v[j][0], v[j][1]);
            }
        });
        __syncthreads();
        update_rows<Tile, kPitch>(first_m, first_n, tile);
        const int ones = in - first_n, row = static_cast<int>(threadIdx.x);
        static_assert(Tile::BM <= kTensorBlock);
        if (0 <= ones && ones < Tile::BN && row < Tile::BM && first_m + row < out) {
            update(bias + first_m + row, tile[row * kPitch + ones]);
        }
    }

 private:
    template <typename Tile, int kPitch>
    __device__ __forceinline__ void update_rows(int first_m, int first_n, const float* tile) const {
        constexpr int kWarps = kTensorBlock / 32, kRows = 4;
        static_assert(Tile::BN == 128 && Tile::BM % (kWarps * kRows) == 0);
        const int warp = static_cast<int>(threadIdx.x) / 32;
        const int column = static_cast<int>(threadIdx.x) % 32 * 4;
        const int end = first_n + column < in ? min(Tile::BM, out - first_m) : 0;
        for (int row = warp; row < end; row += kWarps * kRows) {
            typename Update::Quad quad[kRows];
            std::int64_t at[kRows];
            SIMT_UNROLL
            for (int r = 0; r < kRows; ++r) {
                at[r] = std::int64_t{first_m + row + r * kWarps} * in + first_n + column;
                if (row + r * kWarps < end) {
                    quad[r] = update.load(at[r]);
                }
            }
            SIMT_UNROLL
            for (int r = 0; r < kRows; ++r) {
                if (row + r * kWarps < end) {
                    update.compute(at[r], load4(tile + (row + r * kWarps) * kPitch + column),
                                   quad[r]);
                    update.store(at[r], quad[r]);
                }
            }
        }
    }
};

}  // namespace gyre::SIMT_NAMESPACE
