// The two correlations of a convolution for one block of images: y from x, and dx from dy.
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

    // The padding required of the input.
    const PaddedPlane& plane() const { return plane_; }
    // Workspace: for the rearranged weights, and per worker.
    virtual std::int64_t weight_floats() const { return 0; }
    virtual std::int64_t worker_floats() const { return 0; }
    // Rearranges the convolution's weights w into `to`, or returns w if it is used directly.
    virtual const float* arrange(const float* w, float* /*to*/) const { return w; }
    // Operands. bias may be null.
    struct Input {
        const float *padded, *weights, *bias;
    };
    virtual void run(const Context& context, const Input& in,
                     const Conv2dTail::Output& to) const = 0;

 private:
    const PaddedPlane plane_;
};

// The padding of x in the tile's forward pass and in the weight gradient.
inline PaddedPlane forward_plane(const Conv2dShape& shape) {
    return {shape.in.height + 2 * shape.padding, shape.in.width + 2 * shape.padding, shape.padding};
}

// The forward passes keep a reference to the tail.
std::unique_ptr<Direction> make_tile_forward(const Conv2dShape& shape, const Conv2dTail& tail,
                                             int threads);
std::unique_ptr<Direction> make_tile_backward(const Conv2dShape& shape, int threads);

}  // namespace gyre::cpu
