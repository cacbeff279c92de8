// 2-D convolution (cross-correlation, as PyTorch's Conv2d) on the CPU.
//
//   forward:  y[o][oh][ow] = b[o] + sum over c, kh, kw of
//                 w[o][c][kh][kw] x[c][oh*s - p + kh][ow*s - p + kw]
//   input:    dx[c][ih][iw] = sum over o, and kh, kw where the divisions leave no remainder, of
//                 w[o][c][kh][kw] dy[o][(ih + p - kh)/s][(iw + p - kw)/s]
//   weights:  conv2d_weights.hpp
//
// Forward and input gradient are the same correlation, computed for one block of images at a time
// by the register tile (conv2d_tile.cpp). If windows extend beyond the edge, they read a
// zero-padded copy of the block. Operations fused with a convolution are in conv2d_tail.hpp. If it
// is faster, Winograd filtering computes all three instead (winograd.cpp).
#include <algorithm>

#include "kernels/cpu/conv2d_direction.hpp"
#include "kernels/cpu/conv2d_weights.hpp"
#include "kernels/cpu/ops.hpp"
#include "kernels/cpu/winograd.hpp"

namespace gyre::cpu {
namespace {

class Conv2dOp final : public Op {
 public:
    Conv2dOp(const Context& context, const Conv2dSpec& spec, const OpSizes& sizes)
        : context_(context),
          in_(spec.shape.in),
          out_(spec.shape.out()),
          tail_(spec, sizes.train_images),
          forward_(make_tile_forward(spec.shape, tail_, context.pool.threads())),
          backward_(make_tile_backward(spec.shape, context.pool.threads())),
          weight_gradient_(spec.shape, tail_, block_count(sizes.train_images)) {
        reserve(*forward_, in_);
        reserve(*backward_, out_);
        context.workspace.reserve(weight_gradient_.shared_floats(),
                                  weight_gradient_.worker_floats());
    }

    OpNeeds needs() const override {
        return {.saved_bytes = tail_.saved_bytes(), .backward_reads_y = tail_.relu()};
    }

    void forward(const Batch& batch, const OpIo& io) override {
        tail_.draw_factors(context_, batch, io.saved);
        run(
            *forward_, batch, io, io.params[1].f32(),
            [&](int block, float* padded) {
                return read(*forward_, in_, io.x.f32(), block, padded);
            },
            [&](int block) { return tail_.output(batch, io, block); });
    }

    void backward_params(const Batch& batch, const OpIo& io) override {
        weight_gradient_.run(context_, block_count(batch.n), io);
    }

    void backward_input(const Batch& batch, const OpIo& io) override {
        const auto unfused = [&](int block, float* padded) {
            pad_block(context_.pool, out_, backward_->plane(), padded,
                      [&](std::int64_t channel, float* first) {
                          tail_.gradient_plane(io, block, static_cast<int>(channel), first,
                                               backward_->plane().line_floats());
                      });
            return padded;
        };
        run(
            *backward_, batch, io, nullptr,
            [&](int block, float* padded) {
                return tail_.any() ? unfused(block, padded)
                                   : read(*backward_, out_, io.dy.f32(), block, padded);
            },
            [&](int block) {
                return Conv2dTail::Output{.y = io.dx.f32() + block * in_.elems() * kLanes};
            });
    }

 private:
    static std::int64_t padded_floats(const Direction& direction, const Shape& from) {
        return from.channels * direction.plane().plane_floats();
    }
    void reserve(const Direction& direction, const Shape& from) const {
        context_.workspace.reserve(
            whole_lines(direction.weight_floats()) + padded_floats(direction, from),
            direction.worker_floats());
    }
    // Runs one direction block by block, from the result of source(block, memory for a padded copy)
    // to target(block).
    template <typename Source, typename Target>
    void run(const Direction& direction, const Batch& batch, const OpIo& io, const float* bias,
             Source&& source, Target&& target) const {
        float* const shared = context_.workspace.shared();
        float* const padded = shared + whole_lines(direction.weight_floats());
        const float* const weights = direction.arrange(io.params[0].f32(), shared);
        for (int block = 0; block < block_count(batch.n); ++block) {
            direction.run(context_, {source(block, padded), weights, bias}, target(block));
        }
    }
    // Returns block `block` of x, copied if it needs padding.
    const float* read(const Direction& direction, const Shape& shape, const float* x, int block,
                      float* padded) const {
        const PaddedPlane& plane = direction.plane();
        const float* from = x + block * shape.elems() * kLanes;
        if (plane.height == shape.height && plane.width == shape.width) {
            return from;
        }
        pad_block(context_.pool, shape, plane, from, padded);
        return padded;
    }

    const Context context_;
    const Shape in_, out_;  // of the convolution without its tail
    const Conv2dTail tail_;
    const std::unique_ptr<Direction> forward_, backward_;
    const WeightGradient weight_gradient_;
};

}  // namespace

std::unique_ptr<Op> make_op(const Context& context, const Conv2dSpec& spec, const OpSizes& sizes) {
    if (spec.channels_last()) {
        return nullptr;
    }
    if (winograd_pays(spec.shape)) {
        return make_winograd(context, spec, sizes);
    }
    return std::make_unique<Conv2dOp>(context, spec, sizes);
}

}  // namespace gyre::cpu
