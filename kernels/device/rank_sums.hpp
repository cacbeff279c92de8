// Communication that an operation needs within a pass, so that kernels know no communicator.
#pragma once

#include <cstdint>

namespace gyre {

// The terms that a rank adds to a sum: the values [elems] of each of its leaves (Batch::leaf),
// those of the next one stride_elems further. In the device's memory.
struct LeafValues {
    float* data = nullptr;
    std::int64_t elems = 0;
    int leaves = 1;
    std::int64_t stride_elems = 0;
};

// Sums over the leaves of all ranks, for operations that need them within a pass (statistics of the
// global batch). In the order of the device's calls; all ranks must make the same calls.
class RankSums {
 public:
    virtual ~RankSums() = default;
    // Leaves the sum in the first leaf's place; those of the others are undefined afterwards.
    virtual void sum(const LeafValues& values) = 0;
};

}  // namespace gyre
