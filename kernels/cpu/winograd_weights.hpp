// The gradients of weights and bias of a convolution by Winograd's filtering:
//
//   dw[o][c] = G^T [ sum over images and tiles of (A dy[o] A^T) * (B^T x[c] B) ] G
//
// For each point the sum is a product of matrices, over all lanes of some tiles at a time. Input
// channels are its columns: the transformed x has them as the fastest dimension.
#pragma once

#include "kernels/cpu/tile.hpp"
#include "kernels/cpu/winograd_tiles.hpp"

namespace gyre::cpu {

template <int K>
class WinogradWeights {
 public:
    // Keeps references.
    WinogradWeights(const Conv2dShape& shape, const Conv2dTail& tail,
                    const WinogradTiles<K>& tiles);
    // Of the workspace.
    std::int64_t shared_floats() const;
    std::int64_t worker_floats() const { return WinogradTiles<K>::kScratch; }
    // Overwrites the gradients, with zeros for no blocks.
    void run(const Context& context, int blocks, const OpIo& io) const;

 private:
    static constexpr int kPoints = WinogradTiles<K>::kPoints;
    // Parts of the workspace: the transformed x [point][tile][lane][channel] and dy
    // [point][channel][tile][lane], the sums [point][out channel][channel], those of the bias
    // [out channel][lane], and a block of dy before the tail where that is apart.
    struct Memory {
        float *x, *dy, *sums, *bias, *unfused;
    };
    Memory memory(float* shared) const;
    std::ptrdiff_t padded_channels() const { return whole_lines(channels_); }
    std::ptrdiff_t x_point() const {
        return WinogradTiles<K>::point_step(groups_.largest() * kLanes * padded_channels());
    }
    std::ptrdiff_t dy_row() const { return groups_.largest() * kLanes; }
    std::ptrdiff_t dy_point() const { return WinogradTiles<K>::point_step(rows_.total * dy_row()); }
    std::ptrdiff_t sums_point() const { return rows_.total * padded_channels(); }
    std::int64_t unfused_floats() const { return tiles_.tail_apart() ? out_.elems() * kLanes : 0; }

    void transform(const Context& context, const OpIo& io, int block, int group,
                   const Memory& memory) const;
    void add_products(const Context& context, int group, const Memory& memory) const;
    void store_gradients(const Context& context, const Memory& memory, const OpIo& io) const;

    const int channels_;
    const Shape in_, out_;
    const Conv2dTail& tail_;
    const WinogradTiles<K>& tiles_;
    const Split rows_, cols_;  // of the sums: output channels, and lines of 16 input channels
    const Split groups_;       // of tiles, so many at a time as a cache holds
};

extern template class WinogradWeights<3>;
extern template class WinogradWeights<5>;

}  // namespace gyre::cpu
