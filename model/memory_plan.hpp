// Memory planned by liveness: blocks that are never needed at the same time share memory.
#pragma once

#include <cstddef>
#include <vector>

#include "base/round_up.hpp"

namespace gyre::model {

// Needed from time `first` to time `last`, both included.
struct Lifetime {
    std::size_t bytes = 0;
    int first = 0, last = -1;
    bool never() const { return last < first || bytes == 0; }
};

struct MemoryPlan {
    std::vector<std::size_t> offsets;  // of each block, multiples of kBlockAlignBytes
    std::size_t bytes = 0;             // of all
};

constexpr std::size_t kBlockAlignBytes = 256;
inline std::size_t whole_blocks(std::size_t bytes) {
    return round_up(bytes, kBlockAlignBytes);
}

// The largest block first, each at the lowest place that is free for all of its life.
MemoryPlan plan_memory(const std::vector<Lifetime>& blocks);

}  // namespace gyre::model
