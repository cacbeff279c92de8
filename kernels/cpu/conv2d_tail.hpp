// What follows a convolution in a fused operation, in this order, each where the spec has it:
// dropout2d, max-pooling, ReLU.
//
//   y = max(0, max over the window of conv * mask / (1 - probability))
//
// The forward pass applies it to a part of the convolution's output that is still in a cache. The
// backward pass makes the gradient of the convolution's output where it is read, a plane at a time.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/cpu/context.hpp"
#include "kernels/cpu/pooling.hpp"
#include "kernels/cpu/random_mask.hpp"
#include "kernels/ops/op.hpp"

namespace gyre::cpu {

class Conv2dTail {
 public:
    Conv2dTail() = default;  // nothing follows
    Conv2dTail(const Conv2dSpec& spec, int train_images);

    bool any() const { return dropout_ || pools_ || relu_; }
    bool relu() const { return relu_; }
    // Whether it takes more than one output of the convolution, or its image, to tell one of y.
    bool has_windows() const { return dropout_ || pools_; }
    // Of y, with `line` floats from one line of the convolution's output to the next; 1 x 1 where
    // there is no pooling.
    Windows windows(std::ptrdiff_t line) const {
        return {pool_.kernel, pool_.stride, line, out_.height, out_.width};
    }
    bool pools() const { return pools_; }
    const Shape& out() const { return out_; }

    // Saved are the factors of dropout2d, [blocks][channels][lane] floats, and argmax, one byte for
    // each element of y.
    std::size_t saved_bytes() const { return factor_bytes_ + argmax_bytes_; }
    void draw_factors(const Context& context, const Batch& batch, void* saved) const;

    // Where one block of y goes. argmax is null in an evaluation pass, factors without dropout.
    struct Output {
        float* y;
        std::uint8_t* argmax = nullptr;
        const float* factors = nullptr;
    };
    Output output(const Batch& batch, const OpIo& io, int block) const;
    // Rows [row, row + windows.rows) of a channel of y, from x = the convolution's output there.
    void finish(const Output& to, int channel, int row, const Windows& windows,
                const float* x) const;

    // All of y's channels, from the convolution's outputs [channel][row][column][lane].
    void finish_block(const Context& context, const Output& to, const float* x) const;

    // What the gradient of one channel of one block is made of: pointers to its first element, null
    // where the tail has no such part.
    struct Gradient {
        const float *dy, *y = nullptr;
        const std::uint8_t* argmax = nullptr;
        const float* factors = nullptr;  // [lane]
        // dy behind the ReLU, and the position in the window that it goes to.
        Vec at(std::ptrdiff_t i) const {
            const Vec d = load(dy + i);
            return y != nullptr ? pass_above_zero(load(y + i), d) : d;
        }
        IntVec where(std::ptrdiff_t i) const {
            return __builtin_convertvector(load_lanes<ByteVec>(argmax + i), IntVec);
        }
    };
    Gradient gradient(const OpIo& io, int block, int channel) const;
    // The gradient of one plane of the convolution's output, with `line` floats from line to line.
    void gradient_plane(const OpIo& io, int block, int channel, float* to,
                        std::ptrdiff_t line) const;
    // Of all planes of a block, one after another.
    void gradient_block(const Context& context, const OpIo& io, int block, float* to) const;

 private:
    std::int64_t plane_floats() const { return out_.plane_elems() * kLanes; }
    const float* factors(const OpIo& io) const { return static_cast<const float*>(io.saved); }
    std::uint8_t* argmax(const OpIo& io) const {
        return static_cast<std::uint8_t*>(io.saved) + factor_bytes_;
    }

    bool dropout_ = false, pools_ = false, relu_ = false;
    MaxPool2dShape pool_;  // of the convolution's output
    Shape out_;
    bool covers_ = true;
    RandomMask mask_{0.0f, 0};
    std::size_t factor_bytes_ = 0, argmax_bytes_ = 0;
    PoolFunction pool_functions_[2][2] = {};  // [scaled][argmax kept]
    UnpoolFunction unpool_ = nullptr;
};

}  // namespace gyre::cpu
