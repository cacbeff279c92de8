// Counts on the emulator what an operation's launches do, for a benchmark that times the operation
// on a GPU.
#pragma once

#include <string>
#include <vector>

#include "bench/kernels.hpp"
#include "kernels/emulation/profiler.hpp"

namespace gyre::bench {

// Number of blocks of a launch that are counted if not all are.
constexpr std::int64_t kCountedBlocks = 16;

// Counts one call of gyre's own kernels for a layer of nets() with n images, as launched on a GPU
// with this number of multiprocessors. Operands are zeros.
std::vector<simt::LaunchProfile> counts_of(const std::string& net, const std::string& layer,
                                           const std::string& direction, int n, bool tf32,
                                           int multiprocessors);

}  // namespace gyre::bench
