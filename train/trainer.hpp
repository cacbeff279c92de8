// The training step, the same on every device and for every number of ranks.
#pragma once

#include <cstdint>
#include <deque>
#include <optional>
#include <string>

#include "comm/reducer.hpp"
#include "data/sampler.hpp"
#include "model/net.hpp"
#include "train/factors.hpp"
#include "train/images.hpp"
#include "train/optimizer.hpp"

namespace gyre {

struct StepResult {
    std::int64_t step = 0;
    double loss = 0.0;        // mean over the global batch, before the update
    std::int64_t images = 0;  // in the global batch
    bool stop = false;        // some rank was asked to stop; the same on all ranks
    // The parameter with a gradient that is NaN or infinite after the reduction, of several the one
    // closest to the loss; empty: none.
    std::string not_finite;
    Reducer::Times communication;
};

struct TrainerOptions {
    std::uint64_t seed = 1;
    bool shuffle = true;
    int accumulate = 1;  // parts that a rank divides its share of a batch into, one after another
};

class Trainer {
 public:
    // factors: null where all gradients are reduced.
    Trainer(Backend& backend, Net& net, DeviceImages& images, Optimizer& optimizer,
            Reducer& reducer, const Sharding& sharding, const TrainerOptions& options,
            Factors* factors = nullptr)
        : backend_(backend),
          net_(net),
          images_(images),
          optimizer_(optimizer),
          reducer_(reducer),
          sharding_(sharding),
          options_(options),
          factors_(factors),
          kept_(options.accumulate > 1 ? DeviceBuffer<float>(backend, net.gradient_elems())
                                       : DeviceBuffer<float>()),
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

 private:
    // Part `part` of the rank's share; the gradients of the last are all parts' and go to the
    // reducer.
    void compute(const Range& local, std::int64_t global_count, int part, bool stop);

    Backend& backend_;
    Net& net_;
    DeviceImages& images_;
    Optimizer& optimizer_;
    Reducer& reducer_;
    const Sharding sharding_;
    const TrainerOptions options_;
    Factors* factors_;
    DeviceBuffer<float> kept_;  // the sum of the gradients of the parts so far
    const std::int64_t ahead_;
    HostBuffer<float> results_;  // [ahead_ + 1][kTailElems], used in turn
    struct Pending {
        std::int64_t step, images;
        Backend::Transfer transfer;
    };
    std::deque<Pending> pending_;
    std::uint32_t epoch_ = 0;
};

}  // namespace gyre
