#include "train/cli/flags.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <string_view>

#include "train/cli/augment_flag.hpp"
#include "train/cli/flag_values.hpp"
#include "train/cli/recipe.hpp"
#include "train/cli/save_flags.hpp"

namespace gyre::train {
namespace {

// What may differ between the ranks without changing what they learn: tests/ranks_differ_test.cpp
// shows that of each.
constexpr std::string_view kOwnFlags[] = {
    "--rank",          "--init-method",   "--init-timeout",  // each rank's place
    "--threads",       "--kernels-cache",                    // its processors and GPU
    "--data",          "--recipe",                           // what is there is compared
    "--flight-record",                                       // each rank's own file
    "--init",          "--save",          "--resume",        // rank 0's count
    "--overwrite",     "--json",          "--metrics",       // likewise
    "--tensorboard",   "--trace",         "--config",        // what is in there is compared
    "--verbose",       "--quiet",         "--help",
};

// What else a training may have otherwise when it is resumed; of some, what they come to is
// compared: the global batch, the device, the ranks and the length of a schedule.
constexpr std::string_view kNewFlags[] = {
    "--epochs",        "--batch-size", "--global-batch", "--device",          "--no-cuda",
    "--comm",          "--world-size", "--job-id",       "--timeout",         "--share-gpu",
    "--nccl-register", "--graph",      "--graph-steps",  "--tune-buckets",    "--check-sync",
    "--log-interval",  "--save-every", "--keep",         "--target-accuracy", "--max-seconds",
    "--trace-steps",
};

// The flags added from now on stand under this heading in --help.
void heading(CLI::App& app, const char* name) {
    app.option_defaults()->group(name);
}

void add_help(CLI::App& app) {
    app.set_help_flag("-h,--help", "Print this help")->group("Diagnosis");
}

void add_data_flags(CLI::App& app, CommonOptions& o) {
    heading(app, "Data");
    path(app.add_option("--data", o.data,
                        "Data set: a name such as fashion-mnist or mnist, or a folder")
             ->capture_default_str(),
         "NAME|DIR");
    app.add_option("--classes", o.classes, "Number of classes, if not the largest label + 1")
        ->check(at_least(2));
    app.add_option_function<std::string>(
           "--resize",
           [&o](const std::string& text) {
               ImageSize size;
               char end = 0;
               if (std::sscanf(text.c_str(), "%dx%d%c", &size.height, &size.width, &end) != 2 ||
                   std::min(size.height, size.width) < 1 ||
                   std::max(size.height, size.width) > 1 << 14) {
                   throw CLI::ValidationError(
                       "--resize",
                       fmt::format("'{}' must be rows and columns from 1 to 16384, such as 64x64",
                                   text));
               }
               o.resize = size;
           },
           "Bring all images to this size; otherwise they must agree")
        ->type_name("HxW");
    app.add_option("--mean", o.mean,
                   "Mean of the pixels in [0, 1], one or one per channel; measured if absent")
        ->delimiter(',');
    app.add_option("--std", o.stddev,
                   "Standard deviation of the pixels, like --mean; measured if absent")
        ->delimiter(',');
    app.add_option("--test-batch-size", o.test_batch_size, "Images per rank in an evaluation pass")
        ->capture_default_str()
        ->check(at_least(1));
}

void add_rank_flags(CLI::App& app, CommonOptions& common) {
    LaunchOptions& o = common.launch;
    heading(app, "Ranks");
    one_of(app.add_option(
                  "--comm", o.comm,
                  "What gradients are reduced over: nccl (CUDA GPUs), mpi, gloo (without mpirun), "
                  "or auto: NCCL where the ranks have GPUs and it is found, otherwise as started")
               ->capture_default_str(),
           {"auto", "nccl", "mpi", "gloo"});
    app.add_option("--init-method", o.init_method,
                   "Where the ranks meet: mpi, env:// (MASTER_ADDR, MASTER_PORT), tcp://HOST:PORT "
                   "(rank 0 listens there), or file:///PATH (a new folder that all see) [as the "
                   "launcher says]")
        ->type_name("URL")
        ->check(CLI::Validator(
            [](const std::string& text) {
                const bool known = text == "mpi" || text == "env://" ||
                                   text.starts_with("tcp://") || text.starts_with("file://");
                return known ? std::string{}
                             : fmt::format(
                                   "'{}' must be mpi, env://, tcp://HOST:PORT or "
                                   "file:///PATH",
                                   text);
            },
            ""));
    app.add_option("--rank", o.rank, "This process among the ranks, from 0, if no launcher says it")
        ->check(at_least(0));
    app.add_option("--world-size", o.world_size, "Number of ranks, if no launcher says it")
        ->check(at_least(1));
    app.add_option("--job-id", o.job_id,
                   "Any text, the same on all ranks: keeps jobs apart that meet at one place");
    app.add_option("--init-timeout", o.init_timeout,
                   "Seconds until all ranks must have met and MPI have started, and until NCCL "
                   "must have connected them")
        ->capture_default_str()
        ->check(at_least(0.1));
    app.add_option("--timeout", common.timeout,
                   "Seconds that a rank waits for the others before the job is ended")
        ->capture_default_str()
        ->check(at_least(1.0));
}

void add_gpu_flags(CLI::App& app, CommonOptions& o) {
    heading(app, "GPU");
    add_device_flag(app, o.device,
                    "auto (a GPU where there is one), cpu, cuda, or emulated: the CUDA kernels run "
                    "on the CPU, slowly");
    app.add_flag_callback(
        "--no-cuda", [&o] { o.device = "cpu"; }, "The same as --device cpu");
    one_of(app.add_option("--kernels", o.kernels,
                          "On GPUs: ours, cudnn (and cuBLAS), or auto: the faster of both for each "
                          "layer")
               ->capture_default_str(),
           {"ours", "cudnn", "auto"});
    path(app.add_option("--kernels-cache", o.kernels_cache,
                        "With --kernels auto: keep the timings in this file"));
    app.add_flag("--deterministic", o.deterministic,
                 "On GPUs: libraries use only deterministic algorithms; gyre's own always are");
    app.add_flag("--share-gpu", o.launch.share_gpu,
                 "Ranks may share a GPU: to try things out; otherwise that is refused");
    app.add_flag("--nccl-register", o.launch.nccl_register,
                 "Register the gradients' memory with NCCL, which may then copy less");
}

void add_diagnosis_flags(CLI::App& app, CommonOptions& o) {
    heading(app, "Diagnosis");
    path(app.add_option(
             "--flight-record", o.flight_record,
             "On failure each rank writes its last collectives to this path plus .rankN.json"),
         "PATH");
}

void add_model_flag(CLI::App& app, std::string& model) {
    path(app.add_option("--model", model, "A built-in net (net, wide, resnet) or a model file")
             ->capture_default_str(),
         "NAME|FILE");
}

void add_bucket_flag(CLI::App& app, std::optional<std::int64_t>& bucket_bytes) {
    app.add_option_function<std::string>(
           "--bucket-kib",
           [&bucket_bytes](const std::string& text) {
               std::int64_t kib = 0;
               if (text == "auto") {
                   bucket_bytes.reset();
               } else if (CLI::detail::lexical_cast(text, kib) && kib >= 1) {
                   bucket_bytes = kib * 1024;
               } else {
                   throw CLI::ValidationError("--bucket-kib",
                                              fmt::format("'{}' must be auto or >= 1", text));
               }
           },
           "Size of a gradient bucket in KiB, or auto")
        ->type_name("N|auto")
        ->default_str("auto");
}

void add_schedule_flags(CLI::App& app, TrainOptions& o) {
    ScheduleSpec& schedule = o.optimizer.schedule;
    add_choice(
        app, "--lr-schedule", schedule.kind, kScheduleKinds,
        "How the learning rate changes, with every step of the training: step (by --lr-gamma "
        "every --lr-step-size epochs), cosine (down to --lr-min at the end), one-cycle (from "
        "1/25 up to --lr, and down to almost 0)");
    app.add_option("--lr-step-size", o.lr_step_size, "Epochs between two falls of schedule step")
        ->check(at_least(1));
    app.add_option("--lr-gamma", schedule.gamma, "What the rate falls by, in schedule step [0.1]")
        ->check(at_least(0.0));
    app.add_option("--lr-min", schedule.min_rate, "Where schedule cosine ends [0]")
        ->check(at_least(0.0));
    auto* steps = app.add_option("--warmup-steps", schedule.warmup_steps,
                                 "Steps in which the rate rises from a hundredth to --lr first")
                      ->capture_default_str()
                      ->check(at_least<std::int64_t>(0));
    app.add_option("--warmup-epochs", o.warmup_epochs, "The same, in epochs")
        ->check(at_least(0))
        ->excludes(steps);
}

void add_training_flags(CLI::App& app, TrainOptions& o) {
    heading(app, "Training");
    path(app.add_option("--recipe", o.recipe,
                        fmt::format("Flags under a name ({}), or in a file, one with its value to "
                                    "a line; flags given here override them",
                                    fmt::join(recipe_names(), ", "))),
         "NAME|FILE");
    path(app.add_option("--config", o.config,
                        "Flags from a TOML or INI file, such as `lr = 0.1`; flags given here "
                        "override them, and they a recipe's"));
    app.add_option("--epochs", o.epochs, "Epochs to train")
        ->capture_default_str()
        ->check(at_least(1));
    app.add_option("--target-accuracy", o.target_accuracy,
                   "Stop after the epoch that reaches this percentage of the test images")
        ->type_name("PERCENT")
        ->check(between(1.0, 100.0));
    app.add_option("--max-seconds", o.max_seconds,
                   "Stop after the step in which the run, with its set-up, gets this old by rank "
                   "0's clock")
        ->check(at_least(0.0));
    auto* batch = app.add_option("--batch-size", o.batch_size,
                                 "Images per rank in a step; with --shards per shard")
                      ->capture_default_str()
                      ->check(at_least(1));
    app.add_option("--global-batch", o.global_batch,
                   "Images over all ranks in a step, instead of --batch-size")
        ->check(at_least(1))
        ->excludes(batch);
    app.add_option("--accumulate", o.accumulate,
                   "Passes of --batch-size images that a step adds up before it reduces, once")
        ->capture_default_str()
        ->check(at_least(1));
    app.add_option("--shards", o.shards,
                   "Cut each batch into N parts that are summed up in one order: the same bits on "
                   "any number of ranks that divides N, a power of two [0: not]")
        ->check(at_least(1));
    app.add_option("--seed", o.seed, "Seed of weights, order and dropout")->capture_default_str();
    add_choice(app, "--weight-init", o.init_weights, kWeightInits,
               "How weights of convolutions and linear layers begin: as PyTorch's layers do, or as "
               "torch.nn.init.kaiming_*_ with ReLU's gain (He), biases 0");
    OptimizerSpec& optimizer = o.optimizer;
    add_choice(app, "--optimizer", optimizer.rule, kUpdateRules, "How weights follow gradients");
    app.add_option("--lr", optimizer.learning_rate,
                   "Learning rate [sgd 0.01, adam and adamw 0.001]")
        ->check(at_least(0.0f));
    add_schedule_flags(app, o);
    app.add_option("--momentum", optimizer.momentum, "Momentum of sgd")
        ->capture_default_str()
        ->check(at_least(0.0f));
    app.add_option("--weight-decay", optimizer.weight_decay,
                   "Weight decay [sgd and adam 0, adamw 0.01]")
        ->check(at_least(0.0f));
    app.add_flag("--nesterov", optimizer.nesterov, "Nesterov momentum (sgd)");
    app.add_option("--betas", optimizer.betas, "Coefficients of adam and adamw")
        ->type_name("B1,B2")
        ->delimiter(',')
        ->capture_default_str()
        ->check(between(0.0f, 0.9999999f));
    app.add_option("--eps", optimizer.epsilon, "Epsilon of adam and adamw")
        ->capture_default_str()
        ->check(at_least(0.0f));
    app.add_option("--max-grad-norm", optimizer.max_grad_norm,
                   "Scale the gradients down to this norm where theirs is larger")
        ->check(at_least(0.0f));
    app.add_option("--label-smoothing", o.label_smoothing,
                   "Share of the training's targets that is spread over all classes")
        ->capture_default_str()
        ->check(between(0.0f, 0.9999999f));
    app.add_flag_callback(
        "--no-shuffle", [&o] { o.shuffle = false; }, "Keep the file's order in every epoch");
    app.add_flag_callback(
        "--no-dropout", [&o] { o.dropout = false; }, "Leave the dropout layers out");
    app.add_option_function<std::string>(
           "--augment", [&o](const std::string& text) { o.augment = parse_augment(text); },
           "Change training images, anew in every epoch: any of shiftN and cropN (up to N pixels; "
           "the "
           "edge, or 0, beyond it), rotateN (up to N degrees), hflip, cutoutN (N x N pixels); or "
           "none")
        ->type_name("LIST")
        ->default_str("none");
    app.add_flag_callback(
        "--no-eval", [&o] { o.evaluate = false; }, "Do not evaluate on the test set");
}

void add_reduction_flags(CLI::App& app, TrainOptions& o) {  // after the ranks'
    add_bucket_flag(app, o.reduction.bucket_bytes);
    app.add_flag("--tune-buckets", o.tune_buckets,
                 "Try several sizes of buckets for 20 steps each, and train with the best")
        ->excludes("--bucket-kib");
    add_choice(
        app, "--factors", o.reduction.factors, kFactorUses,
        "Large linear layers gather inputs and output gradients instead of reducing "
        "weights' gradients: on (where that is less), auto (on CPUs where it is less than "
        "half, across hosts; on GPUs where it is less than a quarter of 16 MiB or more), off");
    add_choice(app, "--shard-optimizer", o.shard_optimizer, kShardUses,
               "Each rank updates a share of the parameters, and keeps the optimizer's moments for "
               "that alone (ZeRO stage 1, ZeroRedundancyOptimizer): on, off, or auto: off");
    const Words<DataType> types = {
        {"fp32", DataType::float32}, {"bf16", DataType::bfloat16}, {"fp16", DataType::float16}};
    add_choice(app, "--comm-dtype", o.reduction.type, types,
               "What gradients travel in: fp32; or bf16 or fp16, half as many bytes, each sum "
               "rounded to 8 or 11 bits");
}

void add_output_flags(CLI::App& app, TrainOptions& o) {
    heading(app, "Output");
    add_save_flags(app, o);
    auto* json =
        path(app.add_option("--json", o.json, "Write the progress to this file as JSON lines"));
    app.add_option_function<std::string>(
           "--metrics",
           [&o](const std::string& file) { (file.ends_with(".csv") ? o.csv : o.json) = file; },
           "The same by the file's ending: .csv, a row for each step and epoch, or .jsonl")
        ->type_name("FILE.csv|FILE.jsonl")
        ->check(CLI::Validator(
            [](const std::string& file) {
                return file.ends_with(".csv") || file.ends_with(".jsonl")
                           ? std::string{}
                           : fmt::format("'{}' must end in .csv or .jsonl", file);
            },
            ""))
        ->excludes(json);
    path(app.add_option("--tensorboard", o.tensorboard,
                        "The same for TensorBoard, in a new event file in this folder"),
         "DIR");
    add_trace_flags(app, o);
    app.add_option("--log-interval", o.log_interval, "Steps between two lines of progress")
        ->capture_default_str()
        ->check(at_least(1));
    app.add_flag("-q,--quiet", o.quiet, "Print errors and warnings only");
}

}  // namespace

void add_threads_flag(CLI::App& app, int& threads) {
    app.add_option("--threads", threads, "Threads per rank; 0: this rank's share of the processors")
        ->capture_default_str()
        ->check(between(0, 1024));
}

void add_device_flag(CLI::App& app, std::string& device, const char* description) {
    one_of(app.add_option("--device", device, description)->capture_default_str(),
           {"auto", "cpu", "cuda", "emulated"});
}

void add_precision_flag(CLI::App& app, CommonOptions& o) {
    add_choice(
        app, "--precision", o.precision, kPrecisions,
        "What is computed in: fp32; tf32: on GPUs, operands of convolutions and linear layers "
        "are rounded for tensor cores; bf16, fp16: activations and their gradients in 16 "
        "bits, sums, weights and updates in fp32, the loss scaled for fp16");
}

void add_train_flags(CLI::App& app, TrainOptions& o) {
    add_data_flags(app, o);
    app.add_option("--limit", o.limit, "Train on the first N images only")
        ->check(at_least<std::int64_t>(1));
    heading(app, "Model");
    add_model_flag(app, o.model);
    add_precision_flag(app, o);
    path(app.add_option("--init", o.init, "Start from the weights in this safetensors file"));
    add_training_flags(app, o);
    add_rank_flags(app, o);
    add_threads_flag(app, o.threads);
    add_reduction_flags(app, o);
    add_gpu_flags(app, o);
    add_choice(app, "--graph", o.graph, kGraphUses,
               "Capture the step as a CUDA graph: on, off, or auto: on a GPU, with one rank or "
               "where the ranks reduce on their GPUs");
    app.add_option("--graph-steps", o.graph_steps,
                   "Steps of whole batches in a graph, a Ctrl-C is seen after as many [8; 1 with "
                   "--check-sync]")
        ->check(between(1, 64));
    add_output_flags(app, o);
    add_diagnosis_flags(app, o);
    app.add_option("--check-sync", o.check_sync,
                   "Compare the parameters of all ranks every N steps; 0: never")
        ->capture_default_str()
        ->check(at_least<std::int64_t>(0));
    app.add_flag("-v,--verbose", o.verbose, "Print the net, the buckets and the backend")
        ->excludes("--quiet");
    add_help(app);
    app.footer(
        "Examples:\n"
        "  gyre train --data mnist --epochs 3 --save run\n"
        "  mpirun -np 4 gyre train --model wide --optimizer adam --json log.jsonl");
}

void add_eval_flags(CLI::App& app, EvalOptions& o) {
    add_data_flags(app, o);
    heading(app, "Model");
    path(app.add_option("--weights", o.weights, "Weights to evaluate: a safetensors file")
             ->required());
    path(app.add_option_function<std::string>(
             "--model",
             [&o](const std::string& model) {
                 o.model = model;
                 o.model_given = true;
             },
             "Model, if the weights file does not hold it [net]"),
         "NAME|FILE");
    add_precision_flag(app, o);
    add_rank_flags(app, o);
    add_threads_flag(app, o.threads);
    add_gpu_flags(app, o);
    heading(app, "Output");
    app.add_flag("--per-class", o.per_class, "Images, recall and precision of each class");
    app.add_flag("--confusion", o.confusion, "Which class was taken for which, and how often");
    add_diagnosis_flags(app, o);
    add_help(app);
    app.footer(
        "Examples:\n"
        "  gyre eval --data mnist --weights best.safetensors\n"
        "  mpirun -np 4 gyre eval --data mnist --weights best.safetensors");
}

void add_plan_flags(CLI::App& app, PlanOptions& o) {
    add_model_flag(app, o.model);
    app.add_option("--batch,--batch-size", o.batch_size, "Images per rank in a step")
        ->capture_default_str()
        ->check(at_least(1));
    app.add_option("--ranks", o.ranks, "Numbers of ranks to plan for, such as 8,64,1024")
        ->delimiter(',')
        ->required()
        ->check(at_least(1));
    app.add_option_function<std::string>(
           "--bandwidth",
           [&o](const std::string& text) { o.link.bytes_per_second = parse_bandwidth(text); },
           "Payload of a rank's link, each way: 400Gb (bits a second) or 50GB (bytes a second); "
           "TCP carries 95 % of an Ethernet's")
        ->required();
    app.add_option_function<std::string>(
           "--latency",
           [&o](const std::string& text) { o.link.latency_seconds = parse_latency(text); },
           "Time of an empty message between two ranks, such as 5us")
        ->required();
    add_image(app, o.image);
    app.add_option("--classes", o.classes, "Number of classes")
        ->default_str("10")
        ->check(at_least(2));
    app.add_option("--compute-ms", o.compute_ms,
                   "Milliseconds of the forward and backward pass and, optionally, of the update, "
                   "in place of measuring them here")
        ->delimiter(',')
        ->expected(2, 3)
        ->check(CLI::PositiveNumber);
    add_choice(app, "--optimizer", o.optimizer, kUpdateRules, "Whose update is measured");
    add_device_flag(app, o.device, "What is measured");
    add_precision_flag(app, o);
    add_threads_flag(app, o.threads);
    const Words<AllreduceAlgorithm> algorithms = {{"auto", AllreduceAlgorithm::fastest},
                                                  {"ring", AllreduceAlgorithm::ring},
                                                  {"tree", AllreduceAlgorithm::tree}};
    add_choice(app, "--algorithm", o.algorithm, algorithms,
               "ring, tree (double binary) or auto: the faster of both for each bucket");
    add_bucket_flag(app, o.bucket_bytes);
    path(app.add_option("--json", o.json, "Write the plan to this file"));
}

Settings resumed_flags(const CLI::App& app) {
    Settings flags;
    for (const ManifestEntry& entry : flag_manifest(app)) {
        const std::string name = entry.name.substr(std::string_view("flag ").size());
        if (std::find(std::begin(kNewFlags), std::end(kNewFlags), name) == std::end(kNewFlags) &&
            !entry.value.empty()) {
            flags[name] = entry.value;
        }
    }
    return flags;
}

std::vector<ManifestEntry> flag_manifest(const CLI::App& app) {
    std::vector<ManifestEntry> entries;
    for (const CLI::Option* option : app.get_options()) {
        const std::string name = option->get_name();
        if (std::find(std::begin(kOwnFlags), std::end(kOwnFlags), name) == std::end(kOwnFlags)) {
            entries.push_back(
                {"flag " + name, fmt::format("{}", fmt::join(option->results(), ","))});
        }
    }
    return entries;
}

}  // namespace gyre::train
