// Convolutions with 3 x 3 and 5 x 5 windows by Winograd's minimal filtering, in all directions
// (winograd_transforms.hpp).
#pragma once

#include <memory>

#include "kernels/cpu/context.hpp"
#include "kernels/ops/op.hpp"

namespace gyre::cpu {

// Whether the transforms, whose cost grows with the number of channels, cost less than the products
// they save, which grow with the product of input and output channels.
inline bool winograd_pays(const Conv2dShape& shape) {
    const bool known = shape.stride == 1 && shape.padding < shape.kernel;
    return known && ((shape.kernel == 3 && shape.in.channels >= 16 && shape.out_channels >= 16) ||
                     (shape.kernel == 5 && shape.in.channels >= 8 && shape.out_channels >= 8));
}

std::unique_ptr<Op> make_winograd(const Context& context, const Conv2dSpec& spec,
                                  const OpSizes& sizes);

}  // namespace gyre::cpu
