// The training step, the same on every device and for every number of ranks.
#pragma once

#include <cstdint>
#include <deque>
#include <optional>

#include "comm/reducer.hpp"
#include "data/sampler.hpp"
#include "model/net.hpp"
#include "train/images.hpp"
#include "train/optimizer.hpp"

namespace gyre {

struct StepResult {
    std::int64_t step = 0;
    double loss = 0.0;        // mean over the global batch, before the update
    std::int64_t images = 0;  // in the global batch
    bool stop = false;        // some rank was asked to stop; the same on all ranks
};

struct TrainerOptions {
    std::uint64_t seed = 1;
    bool shuffle = true;
};

class Trainer {
 public:
    Trainer(Backend& backend, Net& net, DeviceImages& images, Optimizer& optimizer,
            Reducer& reducer, const Sharding& sharding, const TrainerOptions& options)
        : backend_(backend),
          net_(net),
          images_(images),
          optimizer_(optimizer),
          reducer_(reducer),
          sharding_(sharding),
          options_(options),
          ahead_(backend.host_memory() ? 0 : 2),
          results_(backend, (ahead_ + 1) * Net::kTailElems) {}

    // Epochs count from 1, steps of an epoch from 0.
    void begin_epoch(std::uint32_t epoch);
    // Submits a step; `stop` asks all ranks to stop. A device works while the host goes on, so what
    // comes back is the result of the step `ahead_` before this, the same one on all ranks.
    std::optional<StepResult> step(std::int64_t step, bool stop);
    // The oldest result that step() has not given back yet.
    std::optional<StepResult> next_result();

    const Sharding& sharding() const { return sharding_; }
    // Seconds this epoch has waited for the reductions of gradients.
    double exposed_seconds() const { return exposed_seconds_; }

 private:
    Backend& backend_;
    Net& net_;
    DeviceImages& images_;
    Optimizer& optimizer_;
    Reducer& reducer_;
    const Sharding sharding_;
    const TrainerOptions options_;
    const std::int64_t ahead_;
    HostBuffer<float> results_;  // [ahead_ + 1][kTailElems], used in turn
    struct Pending {
        std::int64_t step, images;
        Backend::Transfer transfer;
    };
    std::deque<Pending> pending_;
    std::uint32_t epoch_ = 0;
    double exposed_seconds_ = 0.0;
};

}  // namespace gyre
