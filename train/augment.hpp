// --augment: what is done to training images as they are gathered.
#pragma once

#include "kernels/ops/augment.hpp"
#include "train/rooms.hpp"

namespace gyre::train {

// Throws usage_error where a number is too large for images of this shape, which would lose all of
// their content.
void check(const AugmentSpec& spec, const Shape& shape);

}  // namespace gyre::train
