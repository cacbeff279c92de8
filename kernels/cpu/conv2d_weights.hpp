// The gradients of a convolution's weights and bias:
//
//   dw[o][c][kh][kw] = sum_{n,oh,ow} dy[o][oh][ow] x[c][oh*s - p + kh][ow*s - p + kw]
//   db[o] = sum_{n,oh,ow} dy[o][oh][ow]
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels/cpu/context.hpp"
#include "kernels/cpu/conv2d_tail.hpp"
#include "kernels/cpu/padding.hpp"
#include "kernels/cpu/tile.hpp"

namespace gyre::cpu {

class WeightGradient {
 public:
    // Its tile sums over pixels, images and lanes, for kRows channels x kTaps window positions.
    static constexpr int kRows = kRegisters > 16 ? 5 : 2, kTaps = kRegisters > 16 ? 5 : 6;

    // Keeps a reference to the tail.
    WeightGradient(const Conv2dShape& shape, const Conv2dTail& tail, int most_blocks);
    // Workspace sizes.
    std::int64_t shared_floats() const {
        return shape_.padding > 0 ? group_ * padded_block_floats() : 0;
    }
    std::int64_t worker_floats() const {
        return tail_.any() ? kRows * (unfused_ * plane_floats() + sum_floats()) : 0;
    }
    // Overwrites the gradients of weight and bias; zeros if blocks = 0.
    void run(const Context& context, int blocks, const OpIo& io) const;

 private:
    // Image blocks [first, first + blocks), with x padded.
    struct Images {
        int first, blocks;
        const float* x;
        std::ptrdiff_t x_block;
    };
    // Gradients of the convolution's output for some of these blocks and some output channels. If
    // it does not cover all blocks, partial sums carry over from one part to the next.
    struct Part {
        int blocks;
        const float *x, *dy;
        std::ptrdiff_t x_block, dy_block;
        bool first, last;
        float* sums;
    };
    std::int64_t padded_block_floats() const { return shape_.in.channels * plane_.plane_floats(); }
    std::int64_t plane_floats() const { return out_.plane_elems() * kLanes; }
    // For each of the kRows rows.
    std::int64_t sum_floats() const { return (std::int64_t{taps_.parts} * kTaps + 4) * kLanes; }
    void add_rows(int row, int rows, const Images& images, const OpIo& io, float* scratch) const;
    void add_part(int row, int rows, const Part& part, const OpIo& io) const;

    const Conv2dShape shape_;
    const Conv2dTail& tail_;
    const Shape out_;
    const PaddedPlane plane_;
    const Split rows_, taps_;
    int group_;                        // blocks processed at a time
    int unfused_;                      // of these, those with a gradient before the tail at a time
    std::vector<std::ptrdiff_t> tap_;  // offset of each window position, in floats
    std::vector<std::ptrdiff_t> pixel_;  // offset in x of each output pixel
};

}  // namespace gyre::cpu
