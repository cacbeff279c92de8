// One pass of one batch, as every operation is told of it.
#pragma once

#include <cstdint>

#include "kernels/device/rank_sums.hpp"
#include "kernels/device/timeline.hpp"

namespace gyre {

// One pass of one batch. Also a rank with n = 0 makes every call.
struct Batch {
    int n = 0;                  // images of this rank
    std::int64_t global_n = 0;  // of all ranks; 0: n
    bool training = false;      // dropout draws, statistics move, a backward pass follows
    const std::int32_t* samples =
        nullptr;  // [n] on the device: the images' indices in the data set
    std::uint64_t seed = 0;
    const std::uint32_t* epoch = nullptr;  // on the device; null: 0
    RankSums* ranks = nullptr;             // null: this rank alone
    Timeline* timeline = nullptr;          // null: nobody looks
};

}  // namespace gyre
