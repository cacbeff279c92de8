// The two correlations of a convolution, for one block of images: y from x, and dx from dy.
#pragma once

#include <memory>

#include "kernels/cpu/context.hpp"
#include "kernels/cpu/conv2d_tail.hpp"
#include "kernels/cpu/padding.hpp"

namespace gyre::cpu {

class Direction {
 public:
    explicit Direction(const PaddedPlane& plane) : plane_(plane) {}
    virtual ~Direction() = default;

    // How the input is to be padded.
    const PaddedPlane& plane() const { return plane_; }
    // Of the workspace: for the weights as it reads them, for outputs on their way to the tail, and
    // for each worker.
    virtual std::int64_t weight_floats() const { return 0; }
    virtual std::int64_t output_floats() const { return 0; }
    virtual std::int64_t worker_floats() const { return 0; }
    // w as the convolution has it, arranged at `to`, or used where it is.
    virtual const float* arrange(const float* w, float* /*to*/) const { return w; }
    // What it reads, with the parts of the workspace that it asked for. bias: or null.
    struct Input {
        const float *padded, *weights, *bias;
        float* outputs;
    };
    virtual void run(const Context& context, const Input& in,
                     const Conv2dTail::Output& to) const = 0;

 private:
    const PaddedPlane plane_;
};

// Where the forward pass reads x with the tile, and the weights' gradient too.
inline PaddedPlane forward_plane(const Conv2dShape& shape) {
    return {shape.in.height + 2 * shape.padding, shape.in.width + 2 * shape.padding, shape.padding};
}

// The forward passes keep a reference to the tail.
std::unique_ptr<Direction> make_tile_forward(const Conv2dShape& shape, const Conv2dTail& tail,
                                             int threads);
std::unique_ptr<Direction> make_tile_backward(const Conv2dShape& shape, int threads);

// Whether Winograd's transforms, which grow with the channels, cost less than the multiplications
// saved, which grow with their product.
inline bool winograd_pays(const Conv2dShape& shape) {
    return shape.kernel == 3 && shape.stride == 1 && shape.padding <= 2 &&
           shape.in.channels >= 16 && shape.out_channels >= 16;
}
std::unique_ptr<Direction> make_winograd_forward(const Conv2dShape& shape, const Conv2dTail& tail);
std::unique_ptr<Direction> make_winograd_backward(const Conv2dShape& shape);

}  // namespace gyre::cpu
