// Communication that an operation needs within a pass, so that kernels know no communicator.
#pragma once

#include <cstdint>

namespace gyre {

// Sums over all ranks, for operations that need them within a pass (statistics of the global
// batch). In place, in the order of the device's calls; all ranks must make the same calls.
class RankSums {
 public:
    virtual ~RankSums() = default;
    // values: [elems], in the device's memory.
    virtual void sum(float* values, std::int64_t elems) = 0;
};

}  // namespace gyre
