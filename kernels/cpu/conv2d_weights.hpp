// The gradients of a convolution's weights and bias:
//
//   dw[o][c][kh][kw] = sum_{n,oh,ow} dy[o][oh][ow] x[c][oh*s - p + kh][ow*s - p + kw]
//   db[o] = sum_{n,oh,ow} dy[o][oh][ow]
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels/cpu/context.hpp"
#include "kernels/cpu/padding.hpp"
#include "kernels/cpu/tile.hpp"

namespace gyre::cpu {

class WeightGradient {
 public:
    // Its tile sums over pixels, images and lanes for so many output channels and window positions.
    static constexpr int kTile = kTileRows > 4 ? 5 : 3;  // fits 32 or 16 registers

    WeightGradient(const Conv2dShape& shape, int most_blocks);
    // Of the workspace.
    std::int64_t shared_floats() const {
        return shape_.padding > 0 ? group_ * padded_block_floats() : 0;
    }
    // Overwrites dw and db, with zeros for no blocks.
    void run(const Context& context, int blocks, const float* x, const float* dy, float* dw,
             float* db) const;

 private:
    // Some blocks of images, x padded.
    struct Images {
        int blocks;
        const float* x;
        std::ptrdiff_t x_block;
        const float* dy;
    };
    std::int64_t padded_block_floats() const { return shape_.in.channels * plane_.plane_floats(); }
    void add_rows(int row, int rows, const Images& images, float* dw, float* db) const;

    Conv2dShape shape_;
    Shape out_;
    PaddedPlane plane_;
    Split rows_, taps_;
    int group_;                          // blocks at a time
    std::vector<std::ptrdiff_t> tap_;    // offset of each window position, in floats
    std::vector<std::ptrdiff_t> pixel_;  // where each output pixel reads x
};

}  // namespace gyre::cpu
