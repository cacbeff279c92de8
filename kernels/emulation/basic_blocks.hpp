// What the basic blocks of this program compute, by its disassembly.
#pragma once

#include <cstdint>
#include <string>
#include <unordered_map>

namespace gyre::emulated {

struct BasicBlock {
    std::int32_t instructions = 0;
    std::int32_t flop = 0;
};

// The FLOPs of one instruction as objdump prints it ("mulss  %xmm0,%xmm1"): of scalars 1, of
// vectors as many as they have elements, for fused multiply-adds twice that; 0 for everything else.
int flop_of(const std::string& instruction);

// By the address, relative to program_begin(), to which the block's call of
// __sanitizer_cov_trace_pc returns. Empty where there is no objdump.
std::unordered_map<std::uint32_t, BasicBlock> disassemble();

}  // namespace gyre::emulated
