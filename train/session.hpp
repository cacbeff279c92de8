// One training on this rank: the net, its optimiser, the reduction of its gradients and its steps,
// made from settings and wired up once.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "comm/communicator.hpp"
#include "comm/reducer.hpp"
#include "data/dataset.hpp"
#include "data/sampler.hpp"
#include "model/net.hpp"
#include "train/augment.hpp"
#include "train/evaluator.hpp"
#include "train/factors.hpp"
#include "train/images.hpp"
#include "train/optimizer.hpp"
#include "train/rooms.hpp"
#include "train/run_spec.hpp"
#include "train/step_program.hpp"
#include "train/trainer.hpp"

namespace gyre::train {

// The net to train, as far as the model's text and the data determine it.
struct TrainingTask {
    ModelSpec model = {};
    int classes = 10;
    std::vector<std::int64_t> eval_images = {};  // of each set that evaluate() is for
};

// Returns why a training with these settings cannot have virtual ranks; null if it can.
const char* refusal_of_shards(const RunSpec& run);
// Returns the virtual ranks (BatchSpec::shards) of a new training that leaves them open: as many as
// the job may have ranks if these are CPU ranks whose sums can be in the tree's order at little or
// no price; else 0. The same on all ranks.
int choose_shards(const Communicator& comm, const Backend& backend, const RunSpec& run);

class Session {
 public:
    // Collective; with settings that all ranks share. images: an epoch's, which are moved to the
    // device. Parameters are zeros: initialise() or share_parameters() comes next. Communicator and
    // backend must outlive the session.
    // Throws AgreedError for shards, a graph or shares that cannot be, and for what went wrong on
    // some rank; Error(communication) if the ranks' buckets differ.
    Session(Communicator& comm, Backend& backend, const RunSpec& run, const TrainingTask& task,
            ImageSet&& images, const Normalisation& normalisation);

    // Collective. All ranks take rank 0's parameters and state; initialise(): which it makes first
    // as initial_weights.hpp says, where the remarks are its. Throws AgreedError for what that
    // throws.
    void share_parameters();
    std::vector<std::string> initialise();

    // Collective. Loss and accuracy on a set that task.eval_images announced. All ranks take
    // rank 0's state first, as statistics of a rank's own share differ.
    Evaluation evaluate(const DeviceImages& images, const TellDone& tell = {});

    // Collective. Begins again with these buckets, as plan() makes them, and an optimiser that has
    // done no step; parameters stay.
    void restart(std::vector<Bucket> buckets) { restart(std::move(buckets), graph_steps_); }
    void restart(std::vector<Bucket> buckets, int graph_steps);
    std::vector<Bucket> plan(std::optional<std::int64_t> bucket_bytes) const;

    Communicator& communicator() { return comm_; }
    Backend& backend() { return backend_; }
    const RunSpec& run() const { return run_; }
    const Sharding& sharding() const { return sharding_; }
    Net& net() { return *net_; }
    DeviceImages& images() { return *images_; }
    const StepProgram& program() const { return *program_; }
    const MicroBatches& micro_batches() const { return *micro_batches_; }
    // Another net for the same passes, with zeros as parameters, whose training passes leave
    // logits. Throws what its constructor throws.
    std::unique_ptr<Net> net_with_logits() const {
        return make_net(net_->input_shape(), net_->loss_spec(), true);
    }
    // restart() makes these again.
    Optimizer& optimizer() { return *optimizer_; }
    Reducer& reducer() { return *reducer_; }
    Factors& factors() { return *factors_; }
    Trainer& trainer() { return *trainer_; }

 private:
    std::unique_ptr<Net> make_net(const Shape& shape, const LossSpec& loss, bool logits) const;
    void share(float* data, std::int64_t elems);
    void check_shards() const;
    ShardSums shard_sums() const;
    bool by_library() const;       // the communicator's sums are those that are wanted
    FactorUse factor_use() const;  // as far as settings say
    FactorBatch factor_batch() const;
    std::int64_t most_in_pass() const;  // of images, on any rank
    std::vector<int> train_sizes() const;
    int choose_graph_steps() const;
    bool choose_graph() const;

    Communicator& comm_;
    Backend& backend_;
    const RunSpec run_;
    const ModelSpec model_;
    const int classes_;
    const std::vector<std::int64_t> eval_images_;
    const Sharding sharding_;
    const OptimizerSpec optimizer_spec_;  // resolved
    const int graph_steps_;               // as far as graphs are captured
    const int train_batch_;               // the most images in a pass of a rank
    const int eval_batch_;                // likewise
    const bool reduces_on_gpu_;
    const bool shares_;  // updates are shared out among the ranks
    std::unique_ptr<Net> net_;
    std::vector<FactoredLayer> factored_;
    std::unique_ptr<DeviceImages> images_;
    std::unique_ptr<StepProgram> program_;
    std::unique_ptr<MicroBatches> micro_batches_;
    std::unique_ptr<Factors> factors_;
    std::unique_ptr<Reducer> reducer_;
    std::unique_ptr<Optimizer> optimizer_;
    std::unique_ptr<Trainer> trainer_;
};

}  // namespace gyre::train
