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
    // Of the workspace: for the weights as it reads them, and for each worker.
    virtual std::int64_t weight_floats() const { return 0; }
    virtual std::int64_t worker_floats() const { return 0; }
    // w as the convolution has it, arranged at `to`, or used where it is.
    virtual const float* arrange(const float* w, float* /*to*/) const { return w; }
    // What it reads. bias: or null.
    struct Input {
        const float *padded, *weights, *bias;
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

}  // namespace gyre::cpu
