// The work of this program's basic blocks, according to its disassembly.
#pragma once

#include <cstdint>
#include <string>
#include <unordered_map>

namespace simt {

struct BasicBlock {
    std::int32_t instructions = 0;
    std::int32_t flop = 0;
};

// The FLOPs of one instruction as printed by objdump ("mulss %xmm0,%xmm1"): 1 for scalars, the
// number of elements for vectors, twice that for fused multiply-adds; 0 for everything else.
int flop_of(const std::string& instruction);

// Keyed by the return address, relative to program_begin(), of the block's call of
// __sanitizer_cov_trace_pc. Empty without objdump.
std::unordered_map<std::uint32_t, BasicBlock> disassemble();

}  // namespace simt
