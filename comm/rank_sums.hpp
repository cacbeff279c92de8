// Sums over all ranks within a pass, such as the statistics of batch normalisation.
#pragma once

#include "comm/reducer.hpp"
#include "kernels/device/device.hpp"
#include "kernels/device/rank_sums.hpp"

namespace gyre::comm {

// Part of a reducer's steps, while its buckets may be under way: in reports "statistics" of the
// step. Collectives run in the order in which they were started, so a sum waits for the buckets
// before it.
class CommunicatorSums final : public RankSums {
 public:
    // Both outlive this. device: the reducer's.
    CommunicatorSums(Reducer& reducer, Device& device);

    // With one rank nothing. In the device's memory where the communicator works there, also in a
    // graph's capture. Otherwise the host waits for the device's calls so far and for the other
    // ranks; not in a capture.
    void sum(float* values, std::int64_t elems) override;

 private:
    Reducer& reducer_;
    Device& device_;
    PinnedBuffer<float> staging_;  // where the sums travel through the host's memory
};

}  // namespace gyre::comm
