// The weight and bias gradients of a convolution by Winograd's filtering:
//
//   dw[o][c] = G^T [ sum over images and tiles of (A dy[o] A^T) * (B^T x[c] B) ] G
//
// For each point, the sum is a matrix product over all lanes of a group of tiles, of several blocks
// of images if one has few tiles. Its columns are input channels, which are the fastest dimension
// of the transformed x.
#pragma once

#include "kernels/cpu/tile.hpp"
#include "kernels/cpu/winograd_tiles.hpp"

namespace gyre::cpu {

template <int K>
class WinogradWeights {
 public:
    // Keeps references to the tail and the tiles.
    WinogradWeights(const Context& context, const Conv2dShape& shape, const Conv2dTail& tail,
                    const WinogradTiles<K>& tiles, int most_blocks);
    // Workspace sizes.
    std::int64_t shared_floats() const { return most_sums_ * sums_floats(); }
    std::int64_t worker_floats() const;
    // Overwrites the gradients; zeros if blocks = 0.
    void run(int blocks, const OpIo& io) const;

 private:
    static constexpr int kPoints = WinogradTiles<K>::kPoints;
    std::ptrdiff_t padded_channels() const { return whole_lines(channels_); }
    // Transformed x of a group of tiles, [point][tile][lane][channel].
    std::ptrdiff_t x_point() const {
        return WinogradTiles<K>::point_step(dy_row() * padded_channels());
    }
    // Transformed dy of some row parts, [point][out channel][tile][lane].
    std::ptrdiff_t dy_row() const { return std::ptrdiff_t{groups_.largest()} * joined_ * kLanes; }
    std::ptrdiff_t dy_point() const {
        return WinogradTiles<K>::point_step(row_parts_ * kTileRows * dy_row());
    }
    // Sums [point][out channel][channel], followed by the bias's [out channel][lane].
    std::ptrdiff_t sums_point() const { return rows_.total * padded_channels(); }
    std::ptrdiff_t sums_floats() const { return kPoints * sums_point() + rows_.total * kLanes; }
    std::ptrdiff_t plane_floats() const { return out_.plane_elems() * kLanes; }

    // Some blocks and row parts, summed separately; memory: worker_floats().
    struct Task {
        int first_block, last_block, first_part, last_part;
        float *sums, *memory;
    };
    void run_task(const OpIo& io, const Task& task) const;
    void add_products(const OpIo& io, int first_block, int blocks, int group, int first_part,
                      int last_part, const Task& task) const;
    void store_gradients(int sums, const float* from, const OpIo& io) const;

    const Context context_;
    const int channels_;
    const Shape in_, out_;
    const Conv2dTail& tail_;
    const WinogradTiles<K>& tiles_;
    const Split rows_, cols_;  // of the sums: output channels, and groups of 16 input channels
    const Split groups_;       // tiles of a block
    const int joined_;         // blocks that go through a group together; 1 if there are several
    const int row_parts_;      // row parts that share one pass over these
    const int most_sums_;      // separate sums over blocks, independent of the number of threads
};

extern template class WinogradWeights<3>;
extern template class WinogradWeights<5>;

}  // namespace gyre::cpu
