// Sums over all ranks within a pass, such as the statistics of batch normalisation.
#pragma once

#include "comm/reducer.hpp"
#include "kernels/device/rank_sums.hpp"

namespace gyre::comm {

// Part of a reducer's steps, while its buckets may be under way: in reports "statistics" of the
// step. Collectives run in the order in which they were started, so a sum waits for the buckets
// before it.
class CommunicatorSums final : public RankSums {
 public:
    // The reducer outlives this.
    explicit CommunicatorSums(Reducer& reducer) : reducer_(reducer) {}

    // As Reducer::run(); with one rank nothing.
    void sum(float* values, std::int64_t elems) override {
        if (reducer_.communicator().size() > 1) {
            reducer_.run(
                {.kind = Collective::Kind::all_reduce, .data = values, .count = elems},
                "statistics");
        }
    }

 private:
    Reducer& reducer_;
};

}  // namespace gyre::comm
