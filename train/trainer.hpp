// The training step, the same on every device and for every number of ranks.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "comm/rank_sums.hpp"
#include "comm/reducer.hpp"
#include "data/sampler.hpp"
#include "model/net.hpp"
#include "train/factors.hpp"
#include "train/images.hpp"
#include "train/optimizer.hpp"
#include "train/rooms.hpp"

namespace gyre::train {

struct StepResult {
    std::int64_t step = 0;
    double loss = 0.0;  // mean over the global batch, before the update
    float learning_rate = 0.0f;
    std::int64_t images = 0;   // in the global batch
    std::int64_t correct = 0;  // of them, before the update
    bool stop = false;         // some rank was asked to stop; the same on all ranks
    // The parameter with a gradient that is NaN or infinite after the reduction, of several the one
    // closest to the loss; empty: none.
    std::string not_finite;
    Reducer::Times communication;
};

struct TrainerOptions {
    std::uint64_t seed = 1;
    bool shuffle = true;
    int accumulate = 1;  // parts that a rank divides its share of a batch into, one after another
    bool graph = false;  // capture the step of a whole batch as a graph
};

// What a step is made of; a Session has them.
struct StepParts {
    Backend& backend;
    Net& net;
    DeviceImages& images;
    Optimizer& optimizer;
    Reducer& reducer;
    Factors& factors;
};

class Trainer {
 public:
    Trainer(const StepParts& parts, const Sharding& sharding, const TrainerOptions& options)
        : backend_(parts.backend),
          net_(parts.net),
          images_(parts.images),
          optimizer_(parts.optimizer),
          reducer_(parts.reducer),
          factors_(parts.factors),
          sums_(reducer_, backend_),
          sharding_(sharding),
          options_(options),
          kept_(options.accumulate > 1 ? DeviceBuffer<float>(backend_, net_.gradient_elems())
                                       : DeviceBuffer<float>()),
          order_(options.seed, images_.count(), options.shuffle),
          place_(backend_, 1),
          samples_(backend_, sharding.most_local()),
          ahead_(backend_.host_memory() ? 0 : 2),
          results_(backend_, ahead_ + 1),
          scalars_(backend_, ahead_ + 1),
          places_(backend_, ahead_ + 1),
          graph_(options.graph),
          captured_(static_cast<std::size_t>(ahead_ + 1)) {}

    // Epochs count from 1, steps of an epoch from 0.
    void begin_epoch(std::uint32_t epoch);
    // Submits a step; `stop` asks all ranks to stop. A device works while the host goes on, so what
    // comes back is the result of the step `ahead_` before this, the same one on all ranks.
    std::optional<StepResult> step(std::int64_t step, bool stop);
    // The oldest result that step() has not given back yet.
    std::optional<StepResult> next_result();

    const Sharding& sharding() const { return sharding_; }
    // Whether whole batches are, or will be, launched as graphs.
    bool graph() const { return graph_; }

 private:
    // What a graph repeats: all that a step asks the device for before its result.
    // Nothing that changes from step to step may be an argument in it.
    void submit(std::int64_t local_count, std::int64_t global_count);
    // Part `part` of the rank's share; the gradients of the last are all parts' and go to the
    // reducer.
    void compute(std::int64_t local_count, std::int64_t global_count, int part);
    void capture(Reducer::Captured& captured, std::int64_t local_count, std::int64_t global_count);

    Backend& backend_;
    Net& net_;
    DeviceImages& images_;
    Optimizer& optimizer_;
    Reducer& reducer_;
    Factors& factors_;
    CommunicatorSums sums_;  // for statistics of the global batch
    const Sharding sharding_;
    const TrainerOptions options_;
    DeviceBuffer<float> kept_;  // the sum of the gradients of the parts so far
    const EpochOrder order_;
    EpochPlace at_;                       // as the device has it when it has done what is submitted
    DeviceBuffer<EpochPlace> place_;      // [1]
    DeviceBuffer<std::int32_t> samples_;  // of the step
    const std::int64_t ahead_;
    // [ahead_ + 1], used in turn: a step's result has been read before they are used again.
    PinnedBuffer<StepTail> results_;
    PinnedBuffer<StepScalars> scalars_;
    PinnedBuffer<EpochPlace> places_;
    struct Pending {
        std::int64_t step, images;
        float learning_rate;
        const StepTail* result;
        Device::Event transfer;
    };
    std::vector<Pending> pending_;  // at most ahead_ + 1, the oldest first
    std::int64_t submitted_ = 0;    // steps
    bool graph_;
    int warm_ups_ = 0;  // steps of a whole batch so far, up to what is enough
    // [ahead_ + 1], used in turn, as a graph's events are read before it is launched again.
    std::vector<Reducer::Captured> captured_;
};

}  // namespace gyre::train
