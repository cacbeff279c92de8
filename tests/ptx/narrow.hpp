// Numbers of 16 bits.
#pragma once

#include <cstdint>

namespace gyre::ptx {

float float_of_f16(std::uint32_t half);
float float_of_bf16(std::uint32_t half);

}  // namespace gyre::ptx
