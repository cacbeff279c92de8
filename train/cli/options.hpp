// What a user can ask of gyre's subcommands; the defaults are the PyTorch tutorials'.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "comm/launch/rendezvous.hpp"
#include "data/dataset.hpp"
#include "kernels/ops/shapes.hpp"
#include "train/checkpoint.hpp"
#include "train/optimizer.hpp"
#include "train/plan.hpp"
#include "train/session.hpp"
#include "train/trace.hpp"

namespace gyre::train {

// What a net computes in: float32; that with operands of products rounded to TF32; or values
// between operations and operands of products in 16 bits, with all sums, weights and updates in
// float32.
enum class Precision { fp32, tf32, bf16, fp16 };
inline const std::vector<std::pair<std::string, Precision>> kPrecisions = {
    {"fp32", Precision::fp32},
    {"tf32", Precision::tf32},
    {"bf16", Precision::bf16},
    {"fp16", Precision::fp16}};
constexpr DataType type_of(Precision precision) {
    return precision == Precision::bf16   ? DataType::bfloat16
           : precision == Precision::fp16 ? DataType::float16
                                          : DataType::float32;
}

// What both commands need.
struct CommonOptions {
    std::string data = "fashion-mnist";  // a data set's name, or a directory
    std::string model = "net";           // a built-in net, or a file
    std::optional<int> classes;
    std::optional<ImageSize> resize;  // empty: images must agree in size
    std::vector<float> mean, stddev;  // per channel, or one for all; empty: measured
    int test_batch_size = 1000;       // images per rank and evaluation pass
    std::string device = "auto";      // auto, cpu, cuda, emulated
    std::string kernels = "ours";     // on GPUs: ours, cudnn, auto
    std::string kernels_cache;        // auto: a file of timings; empty: none
    bool deterministic = false;       // on GPUs: restricts the libraries
    Precision precision = Precision::fp32;
    int threads = 0;            // per rank; 0: the processors this rank may use
    double timeout = 60.0;      // seconds that a rank waits for the others at most
    LaunchOptions launch;       // how the ranks are started and meet
    std::string flight_record;  // path of what each rank writes on failure; empty: none
};

// Epochs or steps between two checkpoints.
struct SaveEvery {
    std::int64_t count = 1;
    bool steps = false;
    bool given = false;
};

struct TrainOptions : CommonOptions {
    // A name or a file, and a file, whose flags stand among the others; empty: none.
    std::string recipe, config;
    int epochs = 10;
    int batch_size = 64;              // per rank, or per shard
    std::optional<int> global_batch;  // over all ranks, instead of batch_size
    int accumulate = 1;               // passes whose gradients a step adds up
    int shards = 0;                   // of the global batch, whatever the ranks; 0: none
    std::optional<std::int64_t> limit;
    std::uint64_t seed = 1;
    WeightInit init_weights = WeightInit::automatic;
    OptimizerSpec optimizer;          // its schedule's lengths as far as they are given in steps,
    std::optional<int> lr_step_size;  // and these two in epochs
    std::optional<int> warmup_epochs;
    float label_smoothing = 0.0f;
    std::optional<double> target_accuracy;  // in percent, of the test images
    std::optional<double> max_seconds;      // of rank 0's clock
    bool shuffle = true;
    bool dropout = true;
    AugmentSpec augment;  // of training images
    bool evaluate = true;
    ReductionSpec reduction;
    bool tune_buckets = false;  // tries several sizes first
    ShardUse shard_optimizer = ShardUse::automatic;
    GraphUse graph = GraphUse::automatic;
    std::optional<int> graph_steps;  // empty: as many as are good for the device
    std::int64_t check_sync = 0;     // steps between comparisons of parameters; 0: none
    int log_interval = 100;          // steps
    std::string init, json, csv;     // paths; empty: none
    std::string tensorboard, save;   // folders; likewise
    std::string trace;               // file; likewise
    TraceSteps trace_steps;
    std::string resume;      // folder or file; likewise
    bool overwrite = false;  // of --save: loses another training's
    SaveEvery save_every;
    int keep = 0;    // numbered checkpoints
    Settings flags;  // those that a resumed training must have, too
    bool verbose = false, quiet = false;
};

struct LaunchCommandOptions {
    int ranks = 0;
    bool gpus = false;  // as many as there are
};

struct EvalOptions : CommonOptions {
    std::string weights;
    bool model_given = false;  // otherwise the model that the weights file names
    bool per_class = false, confusion = false;
};

struct PredictOptions : CommonOptions {
    std::string weights;
    std::vector<std::string> images;  // files
    int top = 3;                      // classes of an image
    bool csv = false;
};

struct PlanOptions : CommonOptions {
    PlanOptions() { classes = 10; }  // MNIST's, as the image is: there is no data set to ask
    Shape image = {1, 28, 28};
    int batch_size = 64;  // per rank
    std::vector<int> ranks;
    Link link;
    AllreduceAlgorithm algorithm = AllreduceAlgorithm::fastest;
    std::vector<double> compute_ms;  // forward, backward, update; empty: measured
    UpdateRule optimizer = UpdateRule::sgd;
    std::optional<std::int64_t> bucket_bytes;  // empty: auto
    std::string json;                          // path; empty: none
};

struct InfoOptions {
    std::string model, weights;  // what to show in place of this machine; empty: none
    Shape image = {1, 28, 28};
    int classes = 10;
};

struct ExportOptions {
    std::string weights, onnx;  // files
};

struct PlotOptions {
    std::vector<std::string> runs;  // files of metrics
    std::string output;
};

}  // namespace gyre::train
