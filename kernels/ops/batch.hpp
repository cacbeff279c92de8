// The arguments that every operation receives for one pass over one batch.
#pragma once

#include <cstdint>

#include "kernels/device/rank_sums.hpp"
#include "kernels/device/timeline.hpp"

namespace gyre {

// A rank with n = 0 makes all the same calls.
struct Batch {
    int n = 0;                  // images on this rank, or in this leaf of it
    std::int64_t global_n = 0;  // images on all ranks; 0: the same as n
    bool training = false;      // dropout and running statistics are active; backward follows
    const std::int32_t* samples =
        nullptr;  // [n] on the device: the images' indices in the data set
    std::uint64_t seed = 0;
    const std::uint32_t* epoch = nullptr;  // on the device; null: 0
    RankSums* ranks = nullptr;             // null: this rank only
    Timeline* timeline = nullptr;          // null: no timeline is recorded
    // A rank's images of a step may be several batches, its leaves, which go through the net side
    // by side, each with tensors of its own.
    int leaf = 0, leaves = 1;
};

}  // namespace gyre
