// What warp operations compute, once all 32 lanes have arrived.
#pragma once

#include <array>

#include "kernels/emulation/emulator.hpp"

namespace gyre::emulated::emulator {

constexpr unsigned kWarp = 32;
using WarpOperands = std::array<void*, kWarp>;  // of the lanes; results go to the same places

void compute(WarpOperation operation, const WarpOperands& operands);

// 2 m n k of a product on tensor cores; 0 for other operations.
int mma_flop(WarpOperation operation);

}  // namespace gyre::emulated::emulator
