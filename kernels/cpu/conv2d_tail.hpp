// The operations fused with a convolution, in this order, each if the spec has it: dropout2d,
// max-pooling, ReLU.
//
//   y = max(0, max over the window of conv * mask / (1 - probability))
//
// The forward pass applies them to parts of the convolution's output that are still in a cache. The
// backward pass computes the gradient of that output one plane at a time, as it is needed.
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
    Conv2dTail() = default;  // nothing is fused
    Conv2dTail(const Conv2dSpec& spec, int train_images);

    bool any() const { return dropout_ || pools_ || relu_; }
    bool relu() const { return relu_; }
    // True if one element of y depends on several outputs of the convolution, or on the image.
    bool has_windows() const { return dropout_ || pools_; }
    // The windows of y, with `line` floats from one line of the convolution's output to the next;
    // 1 x 1 without pooling.
    Windows windows(std::ptrdiff_t line) const {
        return {pool_.kernel, pool_.stride, line, out_.height, out_.width};
    }
    bool pools() const { return pools_; }
    const Shape& out() const { return out_; }

    // Saved data: dropout2d's factors, floats [blocks][channels][lane], and argmax, one byte per
    // element of y.
    std::size_t saved_bytes() const { return factor_bytes_ + argmax_bytes_; }
    void draw_factors(const Context& context, const Batch& batch, void* saved) const;

    // Destination of one block of y. argmax is null in evaluation, factors is null without dropout.
    struct Output {
        float* y;
        std::uint8_t* argmax = nullptr;
        const float* factors = nullptr;
    };
    Output output(const Batch& batch, const OpIo& io, int block) const;
    // Computes rows [row, row + windows.rows) of a channel of y; x: the convolution's output there.
    void finish(const Output& to, int channel, int row, const Windows& windows,
                const float* x) const;

    // Computes all channels of y from the convolution's outputs [channel][row][column][lane].
    void finish_block(const Context& context, const Output& to, const float* x) const;

    // Inputs of the gradient for one channel of one block: pointers to the first element, null if
    // the tail has no such part.
    struct Gradient {
        const float *dy, *y = nullptr;
        const std::uint8_t* argmax = nullptr;
        const float* factors = nullptr;  // [lane]
        // dy after the ReLU's gradient, and the position within the window that receives it.
        Vec at(std::ptrdiff_t i) const {
            const Vec d = load(dy + i);
            return y != nullptr ? pass_above_zero(load(y + i), d) : d;
        }
        IntVec where(std::ptrdiff_t i) const {
            return __builtin_convertvector(load_lanes<ByteVec>(argmax + i), IntVec);
        }
    };
    Gradient gradient(const OpIo& io, int block, int channel) const;
    // The gradient of one plane of the convolution's output, with `line` floats per line.
    void gradient_plane(const OpIo& io, int block, int channel, float* to,
                        std::ptrdiff_t line) const;
    // The gradients of all planes of a block, stored consecutively.
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
    PoolFunction<> pool_functions_[2][2] = {};  // [scaled][argmax kept]
    UnpoolFunction<> unpool_ = nullptr;
};

}  // namespace gyre::cpu
