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
    // Some rank was asked to stop, or for a checkpoint; the same on all ranks.
    bool stop = false, save = false;
    // The parameter with a gradient that is NaN or infinite after the reduction, of several the one
    // closest to the loss; empty: none.
    std::string not_finite;
    // Where the loss is scaled: whether the update was skipped, and the scale of the next step.
    bool skipped = false;
    double loss_scale = 0.0;
    Reducer::Times communication;
};

struct TrainerOptions {
    std::uint64_t seed = 1;
    bool shuffle = true;
    AugmentSpec augment = {};
    int accumulate = 1;   // parts that a rank divides its share of a batch into, one after another
    bool graph = false;   // capture the step of a whole batch as a graph
    int graph_steps = 1;  // so many of them in one, where an epoch has as many left
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
          passes_(sharding.shards > 0 ? sharding.shards / sharding.ranks : options.accumulate),
          kept_state_(backend_, sharding.shards > 0 && passes_ > 1 ? net_.state_elems() : 0),
          order_(options.seed, images_.count(), options.shuffle),
          place_(backend_, 1),
          samples_(backend_, sharding.most_local()),
          ahead_(backend_.host_memory() ? 0 : 2),
          most_steps_(options.graph ? options.graph_steps : 1),
          ring_(backend_, most_steps_),
          results_(backend_, (ahead_ + 1) * most_steps_),
          scalars_(backend_, (ahead_ + 1) * most_steps_),
          places_(backend_, ahead_ + 1),
          found_(shared() ? DeviceBuffer<std::int32_t>(backend_, sharding.ranks)
                          : DeviceBuffer<std::int32_t>()),
          found_ring_(backend_, most_steps_ * sharding.ranks),
          all_found_(backend_, (ahead_ + 1) * most_steps_ * sharding.ranks),
          graph_(options.graph),
          captured_(static_cast<std::size_t>(ahead_ + 1)),
          captured_several_(captured_.size()) {
        ready_.reserve(static_cast<std::size_t>((ahead_ + 1) * most_steps_));
        // Levels of a binary tree, or one running sum.
        for (int passes = passes_; passes > 1; passes = sharding.shards > 0 ? passes / 2 : 1) {
            kept_.emplace_back(backend_, net_.gradient_elems());
        }
        if (found_.get() != nullptr) {
            backend_.fill_zero(found_.get(), found_.bytes());
        }
    }

    // Epochs count from 1, steps of an epoch from 0; first: where an epoch that was begun before
    // goes on.
    void begin_epoch(std::uint32_t epoch, std::int64_t first = 0);
    // Submits a step, with graphs of several also those after it, whose calls then submit nothing.
    // `stop` asks all ranks to stop, with the next step that is submitted, and `save` for a
    // checkpoint. A device works while the
    // host goes on, so what comes back is the result of an earlier step, `ahead_` launches before
    // the last; the same one on all ranks.
    std::optional<StepResult> step(std::int64_t step, bool stop, bool save = false);
    // Whether the next step is not submitted yet; and the first that is not.
    bool at_launch() const { return begin_ >= end_; }
    std::int64_t next_step() const { return end_; }
    // The oldest result that step() has not given back yet.
    std::optional<StepResult> next_result();

    // Steps that are submitted from now on are recorded there, call by call in place of graphs, and
    // the host waits for each; null: not. The same on all ranks.
    void trace(Timeline* timeline);

    const Sharding& sharding() const { return sharding_; }
    // Whether whole batches are, or will be, launched as graphs.
    bool graph() const { return graph_; }
    // Steps of the longest graph.
    int graph_steps() const { return most_steps_; }

 private:
    // What a graph repeats: all that a step asks the device for before its result.
    // Nothing that changes from step to step may be an argument in it.
    // index: among the steps of one launch.
    void submit(std::int64_t local_count, std::int64_t global_count, int index);
    // The graph that begins with `step`, captured now where it has not been; null: that step is
    // submitted call by call.
    const Reducer::Captured* graph_from(std::int64_t step, std::size_t slot);
    // The step, or a graph's.
    void launch(std::int64_t step);
    // The results of the oldest launch; waits for it.
    void collect();
    // at: of the step among results_.
    void read(std::size_t at, std::int64_t step, StepResult& result);
    // After each pass but the last: its gradients go to the sum so far. Of shards that is a binary
    // tree, in which kept_[l] has the sum of 2^l of them that wait for their neighbours.
    void keep(int part);
    void keep_state(int part);
    NextSamplesArgs next_samples(std::int64_t global_count) const;
    // The images of a pass; next: which they are is to be found out first.
    void gather(const Batch& pass, const NextSamplesArgs* next);
    // Pass `part` over the rank's share; the gradients of the last are all passes' and go to the
    // reducer. update: of what the pass can update itself; may be null.
    void compute(std::int64_t global_count, int part, const PassUpdate* update);
    void capture(Reducer::Captured& captured, std::int64_t local_count, std::int64_t global_count,
                 int steps);
    bool shared() const;  // whether some bucket is shared out
    std::size_t ranks() const { return static_cast<std::size_t>(sharding_.ranks); }

    Backend& backend_;
    Net& net_;
    DeviceImages& images_;
    Optimizer& optimizer_;
    Reducer& reducer_;
    Factors& factors_;
    CommunicatorSums sums_;  // for statistics of the global batch
    const Sharding sharding_;
    const TrainerOptions options_;
    const int passes_;                       // of a rank in a step
    std::vector<DeviceBuffer<float>> kept_;  // sums of the gradients of the passes so far
    DeviceBuffer<float> kept_state_;         // as the rank's first shard left it
    const EpochOrder order_;
    EpochPlace at_;                       // as the device has it when it has done what is submitted
    DeviceBuffer<EpochPlace> place_;      // [1]
    DeviceBuffer<std::int32_t> samples_;  // of the step
    const std::int64_t ahead_;            // launches, of one step or several
    const int most_steps_;                // in a launch
    DeviceBuffer<StepTail> ring_;         // [most_steps_]: of the steps of a launch, where several
    // [ahead_ + 1][most_steps_], used in turn: a launch's results have been read before they are
    // used again.
    PinnedBuffer<StepTail> results_;
    PinnedBuffer<StepScalars> scalars_;
    PinnedBuffer<EpochPlace> places_;  // [ahead_ + 1]
    struct Launch {
        std::int64_t step;  // the first
        int steps;
        std::size_t slot;
        Device::Event transfer;
    };
    std::vector<Launch> launches_;   // at most ahead_ + 1, the oldest first
    std::vector<StepResult> ready_;  // of steps that are done, likewise
    std::int64_t launched_ = 0;      // launches
    std::int64_t begin_ = 0;         // the step whose call comes next, where ...
    std::int64_t end_ = 0;           // ... it is before this, submitted already
    // FiniteCheck's word of each rank, where each sees the gradients of its shares alone: all know
    // all of them in the same step. Of a launch's steps, [most_steps_][ranks]; and as results_.
    std::int32_t not_finite(std::size_t at) const;
    DeviceBuffer<std::int32_t> found_, found_ring_;
    PinnedBuffer<std::int32_t> all_found_;
    Timeline* timeline_ = nullptr;
    bool graph_;
    int warm_ups_ = 0;  // steps of a whole batch so far, up to what is enough
    // [ahead_ + 1], used in turn, as a graph's events are read before it is launched again.
    std::vector<Reducer::Captured> captured_, captured_several_;
};

}  // namespace gyre::train
