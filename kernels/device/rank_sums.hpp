// What an operation asks of the other ranks within a pass. Who computes knows no communicator.
#pragma once

#include <cstdint>

namespace gyre {

// Sums over all ranks for operations that need them within a pass (statistics of the global batch):
// in place, in the order of the device's calls; the same calls on all ranks.
class RankSums {
 public:
    virtual ~RankSums() = default;
    // values: [elems], in the device's memory.
    virtual void sum(float* values, std::int64_t elems) = 0;
};

}  // namespace gyre
