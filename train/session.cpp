#include "train/session.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <variant>

#include "comm/launch/rendezvous.hpp"
#include "train/bucket_table.hpp"
#include "train/initial_weights.hpp"

namespace gyre::train {

namespace {
// Least size of a bucket that is shared out, by two operations instead of one: a smaller message
// costs its latency (auto_bucket_bytes()).
constexpr std::int64_t kLeastSharedBytes = 16 << 10;

// The weights as the net takes them: with the mean 1 over the training images.
LossSpec weighted(LossSpec spec, const std::vector<std::int32_t>& labels, int classes) {
    if (spec.class_weights.empty() && !spec.balanced) {
        return spec;
    }
    const auto count = static_cast<std::size_t>(classes);
    if (!spec.balanced && spec.class_weights.size() != count) {
        throw usage_error(fmt::format("`class-weights`: {} numbers, but there are {} classes",
                                      spec.class_weights.size(), classes));
    }
    std::vector<double> images(count),
        weights(spec.class_weights.begin(), spec.class_weights.end());
    for (const std::int32_t label : labels) {
        ++images[static_cast<std::size_t>(label)];
    }
    double sum = 0.0;
    weights.resize(count);
    for (std::size_t k = 0; k < count; ++k) {
        weights[k] = !spec.balanced ? weights[k] : images[k] > 0.0 ? 1.0 / images[k] : 0.0;
        sum += weights[k] * images[k];
    }
    if (!(sum > 0.0)) {
        throw usage_error("`class-weights`: no training image has a weight above 0");
    }
    spec.class_weights.resize(count);
    for (std::size_t k = 0; k < count; ++k) {
        spec.class_weights[k] =
            static_cast<float>(weights[k] * static_cast<double>(labels.size()) / sum);
    }
    return spec;
}

// Kernels count the images of a step in 32 bits.
Sharding checked(const Sharding& sharding) {
    constexpr std::int64_t kMost = std::numeric_limits<std::int32_t>::max();
    if (sharding.global_batch < 1 || sharding.global_batch > kMost) {
        throw AgreedError(
            ExitCode::usage,
            fmt::format("a step would have {} images over all ranks, but it has from 1 to {}; "
                        "lower `batch-size`, `accumulate` or `virtual-ranks`",
                        sharding.global_batch, kMost));
    }
    return sharding;
}

}  // namespace

const char* refusal_of_shards(const RunSpec& run) {
    if (run.device.kernels == "auto") {
        return "`kernels` auto cannot be combined with `virtual-ranks`, as it chooses by what is "
               "fast at the moment, and bits follow; say ours or cudnn";
    }
    return nullptr;
}

int choose_shards(const Communicator& comm, const Backend& backend, const RunSpec& run) {
    const int ranks = std::max(comm.size(), comm::most_ranks());
    const bool in_tree =
        backend.host_memory() && ranks > 1 && (comm.size() == 1 || comm.can_sum_in_tree());
    const bool own_order = run.batch.accumulate > 1 || refusal_of_shards(run) != nullptr;
    return in_tree && !own_order ? ranks : 0;
}

Session::Session(Communicator& comm, Backend& backend, const RunSpec& run, const TrainingTask& task,
                 ImageSet&& images, const Normalisation& normalisation)
    : comm_(comm),
      backend_(backend),
      run_(run),
      model_(task.model),
      classes_(task.classes),
      eval_images_(task.eval_images),
      sharding_(checked({images.count, global_batch(run.batch, comm.size()), comm.rank(),
                         comm.size(), leaves(run.batch)})),
      optimizer_spec_(resolved_optimizer(run, sharding_.steps())),
      graph_steps_(choose_graph_steps()),
      train_batch_(static_cast<int>(most_in_pass())),
      eval_batch_(
          evaluation_batch(comm, eval_images_.empty() ? 0 : *std::ranges::max_element(eval_images_),
                           run.evaluation.batch_size, run.batch.shards)),
      reduces_on_gpu_(comm.use_device(backend) && !backend.host_memory()),
      shares_(run.reduction.shard_optimizer == ShardUse::on && comm.size() > 1) {
    check_shards();
    agree(comm, [&] {
        check(optimizer_spec_);
        check(run.batch.augment, {images.channels, images.height, images.width});
        LossSpec loss = weighted(run.loss, images.labels, classes_);
        loss.mixed = run.batch.augment.mixes();
        net_ = make_net({images.channels, images.height, images.width}, loss, false);
        images_ = std::make_unique<DeviceImages>(backend, std::move(images), normalisation);
        program_ = std::make_unique<StepProgram>(backend, *net_, *images_, run.batch.augment,
                                                 run.net.pass);
    });
    micro_batches_ = std::make_unique<MicroBatches>(
        backend, std::span(net_->gradient_data(), static_cast<std::size_t>(net_->gradient_elems())),
        std::span(net_->state_data(), static_cast<std::size_t>(net_->state_elems())), sharding_,
        run.batch.accumulate, MicroBatches::Rounding{run.reduction.type, net_->stats_offset()});
    // A fused pass gives no factors away.
    factored_ = choose_factored(*net_, backend, comm, factor_batch(),
                                program_->fused() ? FactorUse::off : factor_use(), reduces_on_gpu_);
    const std::vector<Bucket> buckets = plan(run.reduction.bucket_bytes);
    require_same_manifest(comm, {{"the bucket layout", bucket_table(buckets, *net_)}});
    restart(buckets);
}

std::unique_ptr<Net> Session::make_net(const Shape& shape, const LossSpec& loss,
                                       bool logits) const {
    NetOptions options{
        .train_batch = train_batch_,
        .eval_batch = eval_batch_,
        .spec = run_.net,
        .loss = loss,
        .train_sizes = train_sizes(),
        .logits = logits,
        .leaves = sharding_.shards > 0 ? sharding_.shard_count(sharding_.rank) : 0,
        // Passes that `accumulate` asks for are there to save memory.
        .together = run_.batch.accumulate == 1,
        .guest = run_.reports.audit > 0,
        .most_leaves = may_gather(comm_, factor_use(), reduces_on_gpu_) ? sharding_.shards : 0};
    for (const std::int64_t images : eval_images_) {
        for (const int n : evaluation_sizes(comm_, images, eval_batch_, run_.batch.shards)) {
            options.eval_sizes.push_back(n);
        }
    }
    return std::make_unique<Net>(backend_, model_, shape, classes_, options);
}

std::vector<Bucket> Session::plan(std::optional<std::int64_t> bucket_bytes) const {
    // The step's loss and counts must arrive as they are.
    const bool apart = shares_ || run_.reduction.type != DataType::float32;
    std::int64_t bytes =
        bucket_bytes.value_or(auto_bucket_bytes(net_->gradient_elems(), reduces_on_gpu_));
    if (shares_) {  // a bucket is two operations
        bytes =
            std::max(bytes, net_->gradient_elems() * 2 * std::int64_t{sizeof(float)} / kMostParts);
    }
    std::vector<Bucket> buckets = plan_buckets(
        net_->layer_begins(), net_->gradient_elems(), bytes,
        apart ? std::optional(net_->stats_offset()) : std::nullopt, ranges_of(factored_));
    for (Bucket& bucket : buckets) {
        if (bucket.route != Route::factors) {
            bucket.route = by_library() ? Route::library : Route::fixed_order;
            bucket.type =
                bucket.begin < net_->stats_offset() ? run_.reduction.type : DataType::float32;
        }
    }
    return shares_ ? share_out(buckets, comm_.size(), kLeastSharedBytes) : buckets;
}

// Passes that are added up as gradients, rounded or looked at one by one, have no factors, nor has
// a GPU in 16 bits. Through the host's memory a GPU's travel if asked for.
FactorUse Session::factor_use() const {
    const bool apart = sharding_.shards > 0 &&
                       (run_.reports.audit > 0 || run_.reduction.type != DataType::float32);
    const bool from_gpu =
        !backend_.host_memory() && (type_of(run_.net.precision) != DataType::float32 ||
                                    (!reduces_on_gpu_ && run_.reduction.factors != FactorUse::on));
    return run_.batch.accumulate > 1 || apart || from_gpu ? FactorUse::off : run_.reduction.factors;
}

FactorBatch Session::factor_batch() const {
    return {.images = train_batch_,
            .passes = sharding_.shards > 0 ? sharding_.shard_count(0) : 1,
            .shards = sharding_.shards};
}

std::int64_t Session::most_in_pass() const {
    const std::int64_t images = sharding_.global(0).count;
    return sharding_.shards > 0
               ? rank_share(images, 0, sharding_.shards).count
               : rank_share(rank_share(images, 0, comm_.size()).count, 0, run_.batch.accumulate)
                     .count;
}

std::vector<int> Session::train_sizes() const {
    if (run_.batch.shards == 0) {
        return sharding_.sizes(run_.batch.accumulate);
    }
    // The sizes of all shards, so that the choice of kernels does not depend on the rank's own.
    const Sharding all{sharding_.images, sharding_.global_batch, 0, 1, sharding_.shards};
    return all.sizes(sharding_.shards);
}

void Session::check_shards() const {
    const int shards = run_.batch.shards;
    if (shards == 0 && run_.reports.audit > 0) {
        throw AgreedError(
            ExitCode::usage,
            "`audit` needs `virtual-ranks`: only the gradients of one have the same bits on any "
            "rank");
    }
    if (shards == 0) {
        return;
    }
    if (shards < comm_.size()) {
        throw AgreedError(
            ExitCode::usage,
            fmt::format("`virtual-ranks` {}: each of the {} ranks must have one; begin as many "
                        "ranks or fewer, or give a new training more virtual ones",
                        shards, comm_.size()));
    }
    if (const char* const refusal = refusal_of_shards(run_)) {
        throw AgreedError(ExitCode::usage, refusal);
    }
}

bool Session::by_library() const {
    return sharding_.shards == 0 ||
           (comm_.can_sum_in_tree() && parts_are_nodes(sharding_.shards, comm_.size()));
}

ShardSums Session::shard_sums() const {
    ShardSums sums{.shards = sharding_.shards,
                   .earlier = micro_batches_->earlier_nodes(),
                   .by_library = by_library()};
    for (const Node& node : net_->nodes()) {
        if (const auto* norm = std::get_if<BatchNorm2dSpec>(&node.spec); norm != nullptr) {
            sums.pass_elems = std::max(sums.pass_elems, norm->sum_elems());
        }
    }
    for (int rank = 0; rank < comm_.size(); ++rank) {
        const TreeNode own = sharding_.shards_of(rank);
        sums.nodes.push_back(tree_nodes(own.first, own.last, sums.shards));
    }
    return sums;
}

int Session::choose_graph_steps() const {
    const std::optional<int> given = run_.device.graph_steps;
    const bool looks = run_.reports.check_sync > 0 || run_.reports.audit > 0;
    if (looks && given.value_or(1) > 1) {
        throw AgreedError(
            ExitCode::usage,
            "`check-sync` and `audit` compare between steps: leave `graph-steps` at 1");
    }
    constexpr int kStepsOnGpu = 8;
    const bool gpu = backend_.can_capture() && !backend_.device_identity().emulated;
    return given.value_or(gpu && !looks ? kStepsOnGpu : 1);
}

bool Session::choose_graph() const {
    const bool possible = backend_.can_capture() && reducer_->direct();
    if (run_.device.graph == GraphUse::on && !possible) {
        throw AgreedError(
            ExitCode::usage,
            backend_.can_capture()
                ? "`graph` on needs ranks that reduce on their GPUs, or one rank: here gradients "
                  "travel through the host's memory; leave it at auto"
                : "`graph` on is about GPUs, but this run uses the CPU");
    }
    const bool saves_time = !backend_.device_identity().emulated;
    return possible && (run_.device.graph == GraphUse::on ||
                        (run_.device.graph == GraphUse::automatic && saves_time));
}

void Session::restart(std::vector<Bucket> buckets, int graph_steps) {
    trainer_ = nullptr;  // with the graphs of its steps
    optimizer_ = nullptr;
    reducer_ = nullptr;
    factors_ = std::make_unique<Factors>(backend_, *net_, comm_, factored_, factor_batch());
    reducer_ = std::make_unique<Reducer>(comm_, backend_, std::move(buckets), net_->gradient_data(),
                                         factors_.get(), shard_sums());
    agree(comm_, [&] {
        optimizer_ = std::make_unique<Optimizer>(backend_, *net_, optimizer_spec_, graph_steps,
                                                 reducer_.get());
    });
    trainer_ = std::make_unique<Trainer>(StepParts{.backend = backend_,
                                                   .net = *net_,
                                                   .program = *program_,
                                                   .optimizer = *optimizer_,
                                                   .reducer = *reducer_,
                                                   .factors = *factors_,
                                                   .micro_batches = *micro_batches_},
                                         sharding_, run_, choose_graph() ? graph_steps : 0);
}

std::vector<std::string> Session::initialise() {
    std::vector<std::string> remarks;
    agree(comm_, [&] {
        if (comm_.is_root()) {
            remarks = train::initialise(*net_, *images_, run_);
        }
    });
    share_parameters();
    return remarks;
}

void Session::share_parameters() {
    share(net_->parameter_data(), net_->flat_elems());
    share(net_->state_data(), net_->state_elems());
}

void Session::share(float* data, std::int64_t elems) {
    constexpr std::int64_t kChunkElems = 1 << 20;
    std::vector<float> chunk;
    for (std::int64_t at = 0; at < elems && comm_.size() > 1; at += kChunkElems) {
        chunk.resize(static_cast<std::size_t>(std::min(kChunkElems, elems - at)));
        const std::size_t bytes = chunk.size() * sizeof(float);
        backend_.download(chunk.data(), data + at, bytes);
        comm_.broadcast(chunk.data(), bytes, 0);
        backend_.upload(data + at, chunk.data(), bytes);
    }
}

Evaluation Session::evaluate(const DeviceImages& images, const TellDone& tell) {
    share(net_->state_data(), net_->state_elems());
    return train::evaluate(comm_, backend_, *net_, images,
                           {eval_batch_, run_.batch.shards, run_.evaluation.views}, {}, tell);
}

}  // namespace gyre::train
