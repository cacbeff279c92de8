// Addresses that kernels use, checked.
#pragma once

#include "tests/ptx/warp.hpp"

namespace gyre::ptx {

// The place of an address in the block's window of shared memory, which must be a multiple of
// bytes.
std::uint8_t* shared_memory(const Warp& warp, const Instruction& instruction, std::uint32_t address,
                            std::uint32_t bytes, int lane);

}  // namespace gyre::ptx
