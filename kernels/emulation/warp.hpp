// The computation of warp operations, once all 32 lanes have arrived.
#pragma once

#include <array>

#include "kernels/emulation/emulator.hpp"

namespace simt::emulator {

constexpr unsigned kWarp = 32;
using WarpOperands = std::array<void*, kWarp>;  // one per lane; results are stored in place

void compute(WarpOperation operation, const WarpOperands& operands);

// 2 m n k for a tensor-core product; 0 for other operations.
int mma_flop(WarpOperation operation);

}  // namespace simt::emulator
