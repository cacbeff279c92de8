// What an operation's launches do, as counted on the emulator, for a benchmark that times it on a
// GPU.
#pragma once

#include <string>
#include <vector>

#include "bench/kernels.hpp"
#include "kernels/emulation/profiler.hpp"

namespace gyre::bench {

// Blocks of a launch that are counted where not all are.
constexpr std::int64_t kCountedBlocks = 16;

// One call of gyre's own kernels for a layer of nets(), n images, as they are launched on a GPU of
// so many multiprocessors. Operands are zeros.
std::vector<emulated::LaunchProfile> counts_of(const std::string& net, const std::string& layer,
                                               const std::string& direction, int n, bool tf32,
                                               int multiprocessors);

}  // namespace gyre::bench
