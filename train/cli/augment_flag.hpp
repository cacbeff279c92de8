// What --augment takes.
#pragma once

#include <string>

#include "kernels/ops/augment.hpp"

namespace gyre::train {

// "shift2,hflip", or "none". Throws CLI::ValidationError.
AugmentSpec parse_augment(const std::string& text);

}  // namespace gyre::train
