// 2-D convolution (cross-correlation, as PyTorch's Conv2d) on the CPU.
//
//   forward:  y[o][oh][ow] = b[o] + sum_{c,kh,kw} w[o][c][kh][kw] x[c][oh*s - p + kh][ow*s - p +
//   kw] input:    dx[c][ih][iw] = sum_{o,kh,kw} w[o][c][kh][kw] dy[o][(ih + p - kh)/s][(iw + p -
//   kw)/s]
//             over the kh, kw for which the divisions leave no remainder
//   weights:  conv2d_weights.hpp
//
// Forward and input gradient are the same correlation, of one block of images at a time, by the
// register tile (conv2d_tile.cpp) or where it pays by Winograd's algorithm (winograd.cpp). Where
// windows hang over the edge, they read a zero-padded copy of the block.
#include <algorithm>

#include "kernels/cpu/conv2d_direction.hpp"
#include "kernels/cpu/conv2d_weights.hpp"
#include "kernels/cpu/ops.hpp"

namespace gyre::cpu {
namespace {

class Conv2dOp final : public Op {
 public:
    Conv2dOp(const Context& context, const Conv2dShape& shape, const OpSizes& sizes)
        : context_(context),
          in_(shape.in),
          out_(shape.out()),
          forward_(winograd_pays(shape) ? make_winograd_forward(shape)
                                        : make_tile_forward(shape, context.pool.threads())),
          backward_(winograd_pays(shape) ? make_winograd_backward(shape)
                                         : make_tile_backward(shape, context.pool.threads())),
          weight_gradient_(shape, block_count(sizes.train_images)) {
        reserve(*forward_, in_);
        reserve(*backward_, out_);
        context.workspace.reserve(weight_gradient_.shared_floats(), 0);
    }

    OpNeeds needs() const override { return {}; }

    void forward(const Batch& batch, const OpIo& io) override {
        run(*forward_, batch, in_, io.x.f32(), io.params[0].f32(), io.params[1].f32(), out_,
            io.y.f32());
    }
    void backward_params(const Batch& batch, const OpIo& io) override {
        weight_gradient_.run(context_, block_count(batch.n), io.x.f32(), io.dy.f32(),
                             io.grads[0].f32(), io.grads[1].f32());
    }
    void backward_input(const Batch& batch, const OpIo& io) override {
        run(*backward_, batch, out_, io.dy.f32(), io.params[0].f32(), nullptr, in_, io.dx.f32());
    }

 private:
    void reserve(const Direction& direction, const Shape& from) const {
        context_.workspace.reserve(whole_lines(direction.weight_floats()) +
                                       from.channels * direction.plane().plane_floats(),
                                   direction.worker_floats());
    }
    // One direction, block by block.
    void run(const Direction& direction, const Batch& batch, const Shape& from, const float* x,
             const float* w, const float* bias, const Shape& to, float* y) const {
        const PaddedPlane& plane = direction.plane();
        float* const shared = context_.workspace.shared();
        float* const padded = shared + whole_lines(direction.weight_floats());
        const bool pads = plane.height != from.height || plane.width != from.width;
        const float* const weights = direction.arrange(w, shared);
        for (int block = 0; block < block_count(batch.n); ++block) {
            const float* const x_block = x + block * from.elems() * kLanes;
            if (pads) {
                pad_block(context_.pool, from, plane, x_block, padded);
            }
            direction.run(context_, pads ? padded : x_block, weights, bias,
                          y + block * to.elems() * kLanes);
        }
    }

    const Context context_;
    const Shape in_, out_;
    const std::unique_ptr<Direction> forward_, backward_;
    const WeightGradient weight_gradient_;
};

}  // namespace

std::unique_ptr<Op> make_op(const Context& context, const Conv2dSpec& spec, const OpSizes& sizes) {
    if (spec.fused()) {
        return nullptr;
    }
    return std::make_unique<Conv2dOp>(context, spec.shape, sizes);
}

}  // namespace gyre::cpu
