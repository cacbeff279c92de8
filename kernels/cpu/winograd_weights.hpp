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
    // Keeps references to tail and tiles.
    WinogradWeights(const Context& context, const Conv2dShape& shape, const Conv2dTail& tail,
                    const WinogradTiles<K>& tiles, int most_blocks);
    // Of the workspace.
    std::int64_t shared_floats() const { return most_sums_ * sums_floats(); }
    std::int64_t worker_floats() const;
    // Overwrites the gradients, with zeros for no blocks.
    void run(int blocks, const OpIo& io) const;

 private:
    static constexpr int kPoints = WinogradTiles<K>::kPoints;
    std::ptrdiff_t padded_channels() const { return whole_lines(channels_); }
    // The transformed x, [point][tile][lane][channel], of a group of tiles.
    std::ptrdiff_t x_point() const {
        return WinogradTiles<K>::point_step(groups_.largest() * kLanes * padded_channels());
    }
    // The transformed dy, [point][out channel][tile][lane], of some row parts.
    std::ptrdiff_t dy_row() const { return groups_.largest() * kLanes; }
    std::ptrdiff_t dy_point() const {
        return WinogradTiles<K>::point_step(row_parts_ * kTileRows * dy_row());
    }
    // Sums [point][out channel][channel], and those of the bias [out channel][lane].
    std::ptrdiff_t sums_point() const { return rows_.total * padded_channels(); }
    std::ptrdiff_t sums_floats() const { return kPoints * sums_point() + rows_.total * kLanes; }
    std::ptrdiff_t plane_floats() const { return out_.plane_elems() * kLanes; }

    // Some blocks and row parts, into sums of their own; memory: worker_floats().
    struct Task {
        int first_block, last_block, first_part, last_part;
        float *sums, *memory;
    };
    void run_task(const OpIo& io, const Task& task) const;
    void add_products(const OpIo& io, int block, int group, int first_part, int last_part,
                      const Task& task) const;
    void store_gradients(int sums, const float* from, const OpIo& io) const;

    const Context context_;
    const int channels_;
    const Shape in_, out_;
    const Conv2dTail& tail_;
    const WinogradTiles<K>& tiles_;
    const Split rows_, cols_;  // of the sums: output channels, and lines of 16 input channels
    const Split groups_;       // of tiles, so many at a time as a cache holds
    const int row_parts_;      // that go over them at a time
    const int most_sums_;      // into which the blocks are divided, on any number of threads
};

extern template class WinogradWeights<3>;
extern template class WinogradWeights<5>;

}  // namespace gyre::cpu
