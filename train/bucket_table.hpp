// The gradient buckets of a net, and what their reductions cost, as text.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "comm/reducer.hpp"
#include "model/net.hpp"
#include "train/rooms.hpp"

namespace gyre::train {

// Cost of each bucket's reduction, added up over steps, in seconds.
struct BucketTimes {
    std::vector<Reducer::Times::Of> sums;
    std::int64_t steps = 0;
    double exposed = 0.0;
    double statistics = 0.0;  // of that, for sums within passes

    void add(const Reducer::Times& times);
};

// A line for each bucket. With times, in milliseconds and means over the steps: ready and arrived
// since the begin of the step; exposed: how long the device waited for the bucket. The last line is
// that of the sums within passes, if there are any.
std::string bucket_table(const std::vector<Bucket>& buckets, const Net& net,
                         const BucketTimes* times = nullptr);

}  // namespace gyre::train
