// The size of buckets with which steps are fastest here.
#pragma once

#include <vector>

#include "comm/reducer.hpp"
#include "train/session.hpp"

namespace gyre::train {

struct BucketTrial {
    std::vector<Bucket> buckets = {};
    double seconds = 0.0;  // of a step, the mean of the ranks
    bool taken = false;
};

// Collective. Takes 26 steps on the first batch with each of several plans, the automatic one
// first, and restarts the session with the one that was fastest over the last 20, the same on all
// ranks. Every plan begins with the net as it was, and so does what follows.
std::vector<BucketTrial> tune_buckets(Session& session);

}  // namespace gyre::train
