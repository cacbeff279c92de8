// All settings of a training, each declared once, with its default: a tree of plain structs, of
// which the parts that the rooms below use are declared there. It is passed down by reference; who
// needs a part takes that. train/settings.hpp describes the fields for flags, files and
// checkpoints.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/data_type.hpp"
#include "comm/launch/launch_spec.hpp"
#include "data/data_spec.hpp"
#include "kernels/ops/augment.hpp"
#include "model/net_spec.hpp"
#include "train/optimizer_spec.hpp"
#include "train/rooms.hpp"

namespace gyre::train {

constexpr int kMostShards = 1 << 16;  // of a step's batch

// The images of a step: how many, in which order, and what is done to them.
struct BatchSpec {
    int batch_size = 64;                   // per virtual rank, or rank if there are none, and pass
    std::optional<int> global_batch = {};  // of a step over all ranks, instead of batch_size
    int accumulate = 1;                    // passes that each rank, or shard, is divided into
    // Virtual ranks: a step's batch is cut into so many parts, which are summed up in one order on
    // any number of ranks, of which there are as many at most. 0: weights depend on that number by
    // their rounding.
    int shards = 0;
    bool automatic_shards = true;  // 0 of them: as many as choose_shards() says
    bool shuffle = true;
    AugmentSpec augment = {};
};
// The passes of a step with shards: the terms of its sums, of which each shard has `accumulate`.
// 0: there are no shards. Throws AgreedError(usage) for more than kMostShards.
int leaves(const BatchSpec& spec);
// Images of a step over all ranks.
std::int64_t global_batch(const BatchSpec& spec, int ranks);

// Large linear layers gather inputs and output gradients instead of reducing weights' gradients.
// on: they do where that is fewer bytes; automatic: on CPU ranks where it is less than half as many
// and some rank is on another host, on GPUs, wherever those are, where it is less than a quarter of
// 16 MiB or more.
enum class FactorUse { automatic, on, off };
inline const std::vector<std::pair<std::string, FactorUse>> kFactorUses = {
    {"auto", FactorUse::automatic}, {"on", FactorUse::on}, {"off", FactorUse::off}};

// How the update of large buckets is shared out between the ranks. automatic: not, as nothing
// measured gains by it so far.
enum class ShardUse { automatic, on, off };
inline const std::vector<std::pair<std::string, ShardUse>> kShardUses = {
    {"auto", ShardUse::automatic}, {"on", ShardUse::on}, {"off", ShardUse::off}};

inline const std::vector<std::pair<std::string, DataType>> kReductionTypes = {
    {"fp32", DataType::float32}, {"bf16", DataType::bfloat16}, {"fp16", DataType::float16}};

// How gradients become the sum over the ranks.
struct ReductionSpec {
    std::optional<std::int64_t> bucket_bytes = {};  // empty: auto_bucket_bytes()
    bool tune_buckets = false;                      // several sizes are tried first
    DataType type = DataType::float32;              // that gradients travel in
    FactorUse factors = FactorUse::automatic;
    ShardUse shard_optimizer = ShardUse::automatic;
};

// Test-time augmentation: the views of an image whose logits an evaluation averages.
enum class Views { plain, mirrored };
inline const std::vector<std::pair<std::string, Views>> kViews = {
    {"none", Views::plain},       // the image
    {"hflip", Views::mirrored}};  // that and its mirror image, left to right

struct EvaluationSpec {
    bool enabled = true;    // of a training, after each epoch
    int batch_size = 1000;  // the most images per rank in a pass
    Views views = Views::plain;
};

// When a training ends: by whichever comes first.
struct StopSpec {
    int epochs = 10;
    std::optional<double> target_accuracy = {};  // in percent, of the evaluated images
    std::optional<int> patience = {};            // epochs in a row that are not the best
    std::optional<double> max_seconds = {};      // of rank 0's clock
};

// Why a training ended.
enum class Ending { complete, interrupted, time, target, patience };
struct EndingFacts {
    const char* name;     // in files of metrics
    const char* setting;  // that asked for it; empty: none
    bool within_epoch;    // steps are missing, from which it can resume
};
// In the order of Ending. A setting whose ending is not within an epoch needs an evaluation.
inline constexpr EndingFacts kEndings[] = {{"complete", "", false},
                                           {"interrupted", "", true},
                                           {"max-seconds", "max-seconds", true},
                                           {"target-accuracy", "target-accuracy", false},
                                           {"patience", "patience", false}};
inline const EndingFacts& facts(Ending ending) {
    return kEndings[static_cast<std::size_t>(ending)];
}

// Epochs, steps, or seconds of rank 0's clock between two checkpoints.
struct SaveEvery {
    enum class Unit { epochs, steps, seconds };
    std::int64_t count = 1;
    Unit unit = Unit::epochs;
    bool operator==(const SaveEvery&) const = default;
};

inline constexpr const char* kAutoResume = "auto";

struct CheckpointSpec {
    std::string save = {};  // folder; empty: none are written
    SaveEvery every = {};
    int keep = 0;                    // numbered checkpoints that stay
    std::int64_t receipt_every = 0;  // steps between two hashes; 0: where checkpoints may be
    bool overwrite = false;          // files of another training may be lost
    // Folder or file to resume from, or kAutoResume; empty: a new training begins.
    std::string resume = {};
};

// Steps of a training, counted from 1 over all epochs.
struct TraceSteps {
    std::int64_t first = 11, last = 14;
    bool operator==(const TraceSteps&) const = default;
};

// Reports of a training, for people and programs.
struct ReportSpec {
    std::string metrics = {};  // file: rows if it ends in .csv, otherwise JSON lines; empty: none
    std::string tensorboard = {};  // folder; empty: none
    std::string trace = {};        // file; empty: none
    TraceSteps trace_steps = {};
    int log_interval = 100;       // steps
    std::int64_t check_sync = 0;  // steps between comparisons of the ranks' parameters; 0: none
    std::int64_t audit = 0;       // steps between two of Audit's; 0: none
    bool audit_warns = false;     // instead of ending the training
    bool verbose = false, quiet = false;
};

// The step as a graph of the device. automatic: if it can be captured and saves time.
enum class GraphUse { automatic, on, off };
inline const std::vector<std::pair<std::string, GraphUse>> kGraphUses = {
    {"auto", GraphUse::automatic}, {"on", GraphUse::on}, {"off", GraphUse::off}};

struct DeviceSpec {
    std::string device = "auto";     // auto, cpu, cuda, emulated
    std::string kernels = "ours";    // on GPUs: ours, cudnn, auto
    std::string kernels_cache = {};  // auto: a file of timings; empty: none
    bool deterministic = false;      // on GPUs: restricts the libraries
    int threads = 0;                 // per rank; 0: the processors this rank may use
    GraphUse graph = GraphUse::automatic;
    // Steps of whole batches in a graph; empty: as many as are good for the device. Trainer::step()
    // says what differs with several.
    std::optional<int> graph_steps = {};
};

struct RunSpec {
    std::uint64_t seed = 1;  // of weights, order and dropout
    DataSpec data = {};
    NetSpec net = {};
    BatchSpec batch = {};
    LossSpec loss = {};
    OptimizerSpec optimizer = {};
    ReductionSpec reduction = {};
    EvaluationSpec evaluation = {};
    StopSpec stop = {};
    CheckpointSpec checkpoints = {};
    ReportSpec reports = {};
    DeviceSpec device = {};
    LaunchSpec launch = {};
};

// The optimizer's settings with what follows from others: the lengths of its schedule in steps, of
// which an epoch has so many, and in fp16 the scaling of the loss.
OptimizerSpec resolved_optimizer(const RunSpec& run, std::int64_t epoch_steps);

}  // namespace gyre::train
