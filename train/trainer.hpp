// The training step, the same on every device and for every number of ranks.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "comm/reducer.hpp"
#include "data/sampler.hpp"
#include "model/net.hpp"
#include "train/factors.hpp"
#include "train/graph_cache.hpp"
#include "train/launch_queue.hpp"
#include "train/micro_batches.hpp"
#include "train/optimizer.hpp"
#include "train/rooms.hpp"
#include "train/run_spec.hpp"
#include "train/step_batches.hpp"
#include "train/step_program.hpp"

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
    // If the loss is scaled: whether the update was skipped, and the scale of the next step.
    bool skipped = false;
    double loss_scale = 0.0;
    // If gradients are clipped: their norm before that, over all ranks.
    double gradient_norm = 0.0;
    Reducer::Times communication;
};

// One leaf of a step's sums is computed by two ranks.
struct StepAudit {
    int own_leaf = 0;    // of this rank's: the one that another rank computes, too
    int other_leaf = 0;  // of another rank: the one that this rank computes, too
    std::uint64_t own_hash = 0, other_hash = 0;  // of their gradients, by this rank
};

// The objects that a step uses. A Session owns them.
struct StepParts {
    Backend& backend;
    Net& net;
    const StepProgram& program;
    Optimizer& optimizer;
    Reducer& reducer;
    Factors& factors;
    MicroBatches& micro_batches;
};

class Trainer {
 public:
    // graph_steps: steps of whole batches in one graph, if an epoch has as many left; 0: no step is
    // captured. The settings must outlive the trainer.
    Trainer(const StepParts& parts, const Sharding& sharding, const RunSpec& run, int graph_steps);

    // Epochs count from 1, steps of an epoch from 0; first: the step at which an epoch that was
    // begun before resumes.
    void begin_epoch(std::uint32_t epoch, std::int64_t first = 0);
    // Submits a step, with graphs of several also those after it, whose calls then submit nothing.
    // `stop` asks all ranks to stop, with the next step that is submitted, and `save` for a
    // checkpoint. A device works while the host continues, so what comes back is the result of an
    // earlier step, LaunchQueue::max_in_flight() launches before the last; the same one on all
    // ranks.
    std::optional<StepResult> step(std::int64_t step, bool stop, bool save = false);
    // Returns whether the next step is not submitted yet; and the first step that is not.
    bool at_launch() const { return begin_ >= end_; }
    std::int64_t next_step() const { return end_; }
    // The oldest result that step() has not given back yet.
    std::optional<StepResult> next_result();

    // Steps that are submitted from now on are recorded there, call by call instead of as graphs,
    // and the host waits for each; null: not. The same on all ranks.
    void trace(Timeline* timeline);
    // Steps that are submitted from now on leave their gradients in the net's buffer: a pass does
    // not update parameters itself, and nothing is a graph. The same on all ranks.
    void keep_gradients() { keeps_gradients_ = true; }

    // The steps that are submitted from now on are audited, if there are shards, call by call
    // instead of as graphs; null: not. The same on all ranks.
    void audit(StepAudit* audit) { audit_ = audit; }

    const Sharding& sharding() const { return sharding_; }
    const GraphCache& graphs() const { return graphs_; }

 private:
    // All that a step asks the device for before its result, which is what a graph repeats. Nothing
    // that changes from step to step may be an argument in it. index: among the steps of one
    // launch.
    void submit(std::int64_t local_count, std::int64_t global_count, int index);
    // The gradients of the last pass become those of all passes and go to the reducer. update: for
    // parameters that the pass can update itself; may be null.
    void run_pass(const MicroBatches::Pass& part, std::int64_t global_count,
                  const UpdateArgs* update);
    // The same for all passes at once, as leaves that meet. others: as for run_other(), if audited.
    void run_leaves(std::int64_t global_count, const DeviceBuffer<std::int32_t>& others);
    // Computes the gradients of a leaf that another rank has, and leaves the net's state as it was.
    // others: its samples.
    void run_other(std::int64_t global_count, const DeviceBuffer<std::int32_t>& others);
    DeviceBuffer<std::int32_t> samples_of_other(std::int64_t global_count) const;
    StepProgram::Pass pass_of(const MicroBatches::Pass& part, std::int64_t global_count) const;
    std::uint64_t gradients_hash(const float* gradients) const;
    const Reducer::Captured* graph_from(std::int64_t step);
    // The step, or a graph's.
    void launch(std::int64_t step);
    // The results of the oldest launch; waits for it.
    void collect();
    std::string parameter_at(std::int32_t nonfinite_word) const;

    Backend& backend_;
    Net& net_;
    const StepProgram& program_;
    Optimizer& optimizer_;
    Reducer& reducer_;
    Factors& factors_;
    const Sharding sharding_;
    MicroBatches& micro_batches_;
    LaunchQueue queue_;
    GraphCache graphs_;
    EpochPlace place_;                       // after all that is submitted
    DeviceBuffer<EpochPlace> device_place_;  // [1]
    const StepBatches batches_;
    DeviceBuffer<std::int32_t> samples_;  // of the step
    std::vector<StepResult> ready_;       // of steps that are done, the oldest first
    std::int64_t begin_ = 0;              // the step whose call comes next, and ...
    std::int64_t end_ = 0;                // ... the first one that is not submitted
    Timeline* timeline_ = nullptr;
    bool keeps_gradients_ = false;
    StepAudit* audit_ = nullptr;
};

}  // namespace gyre::train
