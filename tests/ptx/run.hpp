// Runs a kernel's PTX on the CPU: one block after another, and its warps in turn from barrier to
// barrier, 32 lanes with a mask.
#pragma once

#include "tests/ptx/module.hpp"

namespace gyre::ptx {

struct MemoryRange {
    std::uintptr_t begin, end;
};
struct Argument {
    const void* at;
    std::size_t bytes;
};

struct Launch {
    unsigned grid[3] = {1, 1, 1}, block[3] = {1, 1, 1};
    std::size_t shared_bytes = 0;  // dynamic
    std::vector<Argument> arguments;
    std::vector<MemoryRange> memory;  // that the kernel may use; addresses are the host's
};

// Throws Error with instruction, source line and thread where the kernel does what it must not: an
// access that is misaligned or outside of memory, an operation of a warp without some of its lanes,
// a barrier without some warps, asynchronous copies that are left behind, an unknown instruction.
// Returns the number of instructions, counted once for each warp.
std::uint64_t run(const Module& module, const Kernel& kernel, const Launch& launch);

}  // namespace gyre::ptx
