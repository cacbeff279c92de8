// The gradients of weights and bias of a convolution of bfloat16 values (formulas:
// conv2d_weights.hpp).
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/cpu/bf16_tiles.hpp"
#include "kernels/cpu/context.hpp"

namespace gyre::cpu {

// dy and x are copied with the images as depths: those of two pixels are a step's, or of one if the
// stride leaves out pixels of x.
class Bf16WeightGradient {
 public:
    explicit Bf16WeightGradient(const Conv2dShape& shape);
    std::int64_t shared_floats() const;  // of workspace
    // Overwrites both gradients; zeros if blocks = 0.
    void run(const Context& context, int blocks, const OpIo& io) const;

 private:
    static constexpr std::ptrdiff_t kPixelElems = kTileExtent * kLanes;  // of 16 channels

    int taps() const { return shape_.kernel * shape_.kernel; }
    int pairs() const { return pixels_ * kLanes / 2; }
    // dy [tile of channels][row][step][channel][pixel][image]
    std::ptrdiff_t step_elems() const { return std::ptrdiff_t{pixels_} * kPixelElems; }
    std::ptrdiff_t dy_row() const { return out_steps_ * step_elems(); }
    std::int64_t dy_elems() const { return out_tiles_ * out_.height * dy_row(); }
    // x [tile of channels][row][column][pair of images][channel][2]
    std::ptrdiff_t x_row() const { return in_columns_ * kPixelElems; }
    std::int64_t x_elems() const { return std::int64_t{in_tiles_} * in_rows_ * x_row(); }
    // [tile of out channels][tile of in channels][tap][out][in]
    std::int64_t sum_floats() const {
        return std::int64_t{out_tiles_} * in_tiles_ * taps() * kTileSums;
    }
    std::ptrdiff_t sum(int out_tile, int in_tile, int tap) const {
        return ((std::ptrdiff_t{out_tile} * in_tiles_ + in_tile) * taps() + tap) * kTileSums;
    }
    void copy_dy(ThreadPool& pool, const Bfloat16* from, Bfloat16* to) const;
    // Two pixels' pairs of images at a time are transposed as floats, which keeps their bits.
    void copy_x(ThreadPool& pool, const Bfloat16* from, Bfloat16* to) const;
    // Adds the products of one block for 2 x 2 tiles of channels, strip by strip.
    void add(int out_tile, int in_tile, const Bfloat16* dy, const Bfloat16* x, bool first,
             float* sums) const;
    void write(int o, const float* sums, float* dw) const;
    void add_up_bias(int o, int blocks, const Bfloat16* dy, float* db) const;

    const Conv2dShape shape_;
    const Shape out_;
    const int pixels_;     // of a step: two that are adjacent in x, too
    const int out_steps_;  // of a row of dy
    const int in_rows_, in_columns_;
    const int out_tiles_, in_tiles_;
    int strip_ = 1;  // rows of dy whose products are added before the next position of the window
    std::vector<std::ptrdiff_t> dy_rows_, x_rows_;  // where each row of dy begins, and its x
};

}  // namespace gyre::cpu
