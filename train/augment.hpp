// --augment: what is done to training images as they are gathered.
#pragma once

#include <string>

#include "kernels/ops/augment.hpp"
#include "train/rooms.hpp"

namespace gyre::train {

// Reads a list such as "shift2,hflip", or "none". Returns what is wrong with it, or nothing.
std::string read_augment(const std::string& text, AugmentSpec& spec);
// The list, always in the same order.
std::string augment_text(const AugmentSpec& spec);

// Throws usage_error if a number is too large for images of this shape, which would lose all of
// their content.
void check(const AugmentSpec& spec, const Shape& shape);

}  // namespace gyre::train
