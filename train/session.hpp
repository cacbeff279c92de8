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
#include "train/trainer.hpp"

namespace gyre::train {

// How gradients become the sum over the ranks.
struct ReductionSpec {
    std::optional<std::int64_t> bucket_bytes = {};  // empty: auto_bucket_bytes()
    DataType type = DataType::float32;              // that gradients travel in
    FactorUse factors = FactorUse::automatic;
};

// The step as a graph of the device. automatic: where it can be captured and saves time.
enum class GraphUse { automatic, on, off };
inline const std::vector<std::pair<std::string, GraphUse>> kGraphUses = {
    {"auto", GraphUse::automatic}, {"on", GraphUse::on}, {"off", GraphUse::off}};

// Whether the ranks share the update of large buckets out. automatic: no, as nothing measured gains
// by it so far.
enum class ShardUse { automatic, on, off };
inline const std::vector<std::pair<std::string, ShardUse>> kShardUses = {
    {"auto", ShardUse::automatic}, {"on", ShardUse::on}, {"off", ShardUse::off}};

struct SessionSpec {
    ModelSpec model = {};
    int classes = 10;
    std::int64_t global_batch = 64;  // images of a step, over all ranks
    int accumulate = 1;              // passes that a rank divides its share of a step into
    // A step's batch is cut into so many parts, which are summed up in one order on any number of
    // ranks; a power of two and a multiple of that. 0: weights depend on it by their rounding.
    int shards = 0;
    std::uint64_t seed = 1;  // of weights, order and dropout
    WeightInit init = WeightInit::automatic;
    bool shuffle = true;
    bool dropout = true;
    AugmentSpec augment = {};           // of training images
    DataType type = DataType::float32;  // of activations; float16 wants optimizer.loss_scaling
    bool pass = true;                   // the training pass as one operation, where there is one
    float label_smoothing = 0.0f;       // in [0, 1), of the training's loss; evaluations have none
    std::int64_t eval_images = 0;  // of the set that evaluate() is for, over all ranks; 0: none
    int eval_batch = 1000;         // the most of them in a pass of a rank
    OptimizerSpec optimizer = {};
    ReductionSpec reduction = {};
    ShardUse shard_optimizer = ShardUse::automatic;
    GraphUse graph = GraphUse::automatic;
    int graph_steps = 1;  // of whole batches in a graph; Trainer::step() says what then differs
};

class Session {
 public:
    // Collective; with settings that all ranks share. images: an epoch's, which are moved to the
    // device. Parameters are zeros: initialise() or share_parameters() comes next. Communicator and
    // backend must outlive the session.
    // Throws AgreedError for shards, a graph or shares that cannot be, and for what went wrong on
    // some rank; Error(communication) where the ranks' buckets differ.
    Session(Communicator& comm, Backend& backend, const SessionSpec& spec, ImageSet&& images,
            const Normalisation& normalisation);

    // Collective. All ranks take rank 0's parameters and state; initialise(): which it draws from
    // the seed.
    void share_parameters();
    void initialise();

    // Collective. Loss and accuracy on the images that spec.eval_images announced. All ranks take
    // rank 0's state first, as statistics of a rank's own share differ.
    Evaluation evaluate(const DeviceImages& images);

    // Collective. Begins anew with these buckets, as plan() makes them, and an optimiser that has
    // done no step; parameters stay.
    void restart(std::vector<Bucket> buckets) { restart(std::move(buckets), spec_.graph_steps); }
    void restart(std::vector<Bucket> buckets, int graph_steps);
    std::vector<Bucket> plan(std::optional<std::int64_t> bucket_bytes) const;

    Communicator& communicator() { return comm_; }
    Backend& backend() { return backend_; }
    const SessionSpec& spec() const { return spec_; }
    const Sharding& sharding() const { return sharding_; }
    Net& net() { return *net_; }
    DeviceImages& images() { return *images_; }
    // These are made anew by restart().
    Optimizer& optimizer() { return *optimizer_; }
    Reducer& reducer() { return *reducer_; }
    Factors& factors() { return *factors_; }
    Trainer& trainer() { return *trainer_; }

 private:
    void make_net(const Shape& shape);
    void share(float* data, std::int64_t elems);
    void check_shards() const;
    void check_norms() const;
    std::int64_t most_in_pass() const;  // of images, on any rank
    std::vector<int> train_sizes() const;
    bool choose_graph() const;
    bool choose_shares(bool direct) const;

    Communicator& comm_;
    Backend& backend_;
    const SessionSpec spec_;
    const Sharding sharding_;
    const int train_batch_;  // the most images in a pass of a rank
    const int eval_batch_;   // likewise
    const bool reduces_on_gpu_, shares_;
    std::unique_ptr<Net> net_;
    std::vector<FactoredLayer> factored_;
    std::unique_ptr<DeviceImages> images_;
    std::unique_ptr<Optimizer> optimizer_;
    std::unique_ptr<Reducer> reducer_;
    std::unique_ptr<Factors> factors_;
    std::unique_ptr<Trainer> trainer_;
};

}  // namespace gyre::train
