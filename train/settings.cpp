#include "train/settings.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "data/image_cache.hpp"
#include "model/spec.hpp"
#include "train/special_settings.hpp"

namespace gyre::train {
namespace {

using std::string;

constexpr int kMostParts = kMostShards;  // a pass or a shard has an image or more

std::vector<Setting> under(const char* heading, std::vector<Setting> rows) {
    for (Setting& row : rows) {
        row.heading = heading;
    }
    return rows;
}

std::vector<Setting> model_settings(RunSpec& run) {
    return {model_setting(run).may_change(),  // its text is compared
            precision_setting(run),
            path("init", run.net.init, "FILE", "Start from the weights in this safetensors file")
                .of_rank_0(),
            toggle("finetune", run.net.finetune,
                   "With `init`: initialise the layers that the file lacks or has in other shapes")
                .of_rank_0()};
}

std::vector<Setting> length_settings(RunSpec& run) {
    StopSpec& stop = run.stop;
    BatchSpec& batch = run.batch;
    return {
        number("epochs", stop.epochs, {.least = 1}, "Epochs to train").may_change(),
        number("target-accuracy", stop.target_accuracy, {1.0, 100.0},
               "Stop after the epoch that reaches this percentage of the evaluated images")
            .shown_as("PERCENT")
            .may_change(),
        number(
            "patience", stop.patience, {.least = 1},
            "Stop after so many epochs in a row without a better accuracy on the evaluated images")
            .may_change(),
        number("max-seconds", stop.max_seconds, {.least = 0.0},
               "Stop after the step in which the run, with its set-up, gets this old by rank 0's "
               "clock")
            .may_change(),
        // The ranks compare the global batch that these two result in.
        number("batch-size", batch.batch_size, {.least = 1},
               "Images per rank in a step; with `virtual-ranks` per virtual rank")
            .may_change(),
        number("global-batch", batch.global_batch, {.least = 1},
               "Images over all ranks in a step, instead of `batch-size`")
            .instead_of("batch-size")
            .may_change(),
        number("accumulate", batch.accumulate, {1, kMostParts},
               "Passes of `batch-size` images that a step adds up before it reduces, once"),
        virtual_ranks_setting(
            "virtual-ranks", batch,
            "Cut each batch into so many parts, which are summed up in one order: "
            "the same bits on any number of ranks from 1 to that; 0: not; auto: "
            "the number that the training was begun with, which is that of its "
            "ranks where these are CPU ranks"),
        virtual_ranks_setting("shards", batch, "The same as `virtual-ranks`")
            .standing_for("virtual-ranks"),
        number("seed", run.seed, {}, "Seed of weights, order and dropout"),
        choice("weight-init", run.net.weight_init, kWeightInits,
               "How weights of convolutions and linear layers begin: as PyTorch's layers do; as "
               "torch.nn.init.kaiming_*_ with ReLU's gain (He), biases 0; dirac: as PyTorch's, but "
               "the first filters of a convolution pass their channels on"),
        text("init-scale", run.net.init_scale, "PATTERN=F,...",
             "Parameters whose names match begin as F times what `weight-init` draws, such as "
             "'fc1.*=0.1'; of several that match, the last counts")
            .instead_of("init"),
        text("whiten", run.net.whiten, "LAYER",
             "This convolution, which reads the images, begins with filters that whiten windows of "
             "the training's first images, such as 'conv1'; `freeze` leaves them so")
            .instead_of("init"),
    };
}

std::vector<Setting> optimizer_settings(RunSpec& run) {
    OptimizerSpec& optimizer = run.optimizer;
    ScheduleSpec& schedule = optimizer.schedule;
    return {
        optimizer_setting(run, "How weights follow gradients"),
        number("lr", optimizer.learning_rate, {.least = 0.0f},
               "Learning rate [sgd and rmsprop 0.01, adam and adamw 0.001, lion 0.0001]"),
        choice(
            "lr-schedule", schedule.kind, kScheduleKinds,
            "How the learning rate changes, with every step of the training: step (by "
            "`lr-gamma` every `lr-step-size` epochs), cosine (down to `lr-min` at the end), "
            "one-cycle (from 1/25 up to `lr`, and down to almost 0), plateau (by `lr-gamma` when "
            "the evaluated loss has stopped falling, down to `lr-min`)"),
        number("lr-step-size", schedule.step_epochs, {.least = 1},
               "Epochs between two falls of schedule step"),
        number("lr-gamma", schedule.gamma, {.least = 0.0},
               "What the rate falls by, in schedules step and plateau [0.1]"),
        number("lr-min", schedule.min_rate, {.least = 0.0},
               "Where schedules cosine and plateau end [0]"),
        number(
            "lr-patience", schedule.patience, {.least = 0},
            "Epochs in a row without a lower evaluated loss that schedule plateau lets pass [10]"),
        number("warmup-steps", schedule.warmup_steps, {.least = 0},
               "Steps in which the rate rises from a hundredth to `lr` first"),
        number("warmup-epochs", schedule.warmup_epochs, {.least = 0}, "The same, in epochs")
            .instead_of("warmup-steps"),
        number("momentum", optimizer.momentum, {.least = 0.0f}, "Momentum of sgd"),
        number("weight-decay", optimizer.weight_decay, {.least = 0.0f},
               "Weight decay [adamw 0.01, others 0]"),
        toggle("nesterov", optimizer.nesterov, "Nesterov momentum (sgd)"),
        betas_setting(optimizer),
        number("alpha", optimizer.alpha, {0.0f, kBelowOne}, "Coefficient of rmsprop's squares"),
        number("eps", optimizer.epsilon, {.least = 0.0f}, "Epsilon of adam, adamw and rmsprop"),
        number("max-grad-norm", optimizer.max_grad_norm, {.least = 0.0f},
               "Scale the gradients down to this norm where theirs is larger"),
        text("freeze", optimizer.freeze, "PATTERN,...",
             "Leave parameters as they are whose names match a pattern, such as 'conv*' or "
             "'fc1.weight'; with `init`: trains the rest of a net"),
        text("lr-scale", optimizer.lr_scale, "PATTERN=F,...",
             "The learning rate of parameters whose names match is F times the others', such as "
             "'conv*=0.1'; of several that match, the last counts"),
        text("weight-decay-scale", optimizer.decay_scale, "PATTERN=F,...",
             "The weight decay of parameters whose names match is F times the others', such as "
             "'*.bias=0,bn*=0'"),
        number("ema", optimizer.ema, {0.0f, kBelowOne},
               "Keep an exponential moving average of the weights with this decay, such as 0.99: "
               "it is what evaluations look at and best.safetensors has"),
        number("label-smoothing", run.loss.label_smoothing, {0.0f, kBelowOne},
               "Share of the training's targets that is spread over all classes"),
        class_weights_setting(run.loss),
        toggle("no-shuffle", run.batch.shuffle, "Keep the file's order in every epoch", false),
        toggle("no-dropout", run.net.dropout, "Leave the dropout layers out", false),
        augment_setting(run.batch.augment),
        toggle("no-eval", run.evaluation.enabled, "Do not evaluate on the test set", false)
            .instead_of("val-split"),
    };
}

std::vector<Setting> reduction_settings(RunSpec& run) {
    ReductionSpec& reduction = run.reduction;
    return {
        bucket_setting(run),
        toggle("tune-buckets", reduction.tune_buckets,
               "Try several sizes of buckets for 20 steps each, and train with the best")
            .instead_of("bucket-kib")
            .may_change(),
        choice("factors", reduction.factors, kFactorUses,
               "Large linear layers gather inputs and output gradients instead of reducing "
               "weights' gradients: on (where that is less), auto (on CPUs where it is less than "
               "half, across hosts; on GPUs where it is less than a quarter of 16 MiB or more), "
               "off"),
        choice("shard-optimizer", reduction.shard_optimizer, kShardUses,
               "Each rank updates a share of the parameters, and keeps the optimizer's moments for "
               "that alone (ZeRO stage 1, ZeroRedundancyOptimizer): on, off, or auto: off"),
        choice("comm-dtype", reduction.type, kReductionTypes,
               "What gradients travel in: fp32; or bf16 or fp16, half as many bytes, each sum "
               "rounded to 8 or 11 bits"),
    };
}

std::vector<Setting> graph_settings(RunSpec& run) {
    return {choice("graph", run.device.graph, kGraphUses,
                   "Capture the step as a CUDA graph: on, off, or auto: on a GPU, with one rank or "
                   "where the ranks reduce on their GPUs")
                .may_change(),
            number("graph-steps", run.device.graph_steps, {1, 64},
                   "Steps of whole batches in a graph, a Ctrl-C is seen after as many [8; 1 with "
                   "`check-sync`]")
                .may_change()};
}

std::vector<Setting> checkpoint_settings(RunSpec& run) {
    CheckpointSpec& spec = run.checkpoints;
    return {
        path("save", spec.save, "DIR",
             "Write checkpoints to this folder: last.safetensors, at the end of epochs, at Ctrl-C, "
             "SIGTERM and SIGUSR1, and best.safetensors, by test accuracy")
            .of_rank_0(),
        save_every_setting(spec.every).may_change(),
        number("keep", spec.keep, {.least = 0},
               "Also keep the last N checkpoints, as step-N.safetensors")
            .may_change(),
        number("receipt-every", spec.receipt_every, {.least = 0},
               "Steps between two hashes of the weights in the receipt, besides those at "
               "checkpoints and epochs' ends; 0: none")
            .may_change(),
        path("resume", spec.resume, "DIR|FILE|auto",
             "Resume the training that was saved here, to the last bit: the folder of `save`, "
             "or a file in it; auto: that in the folder of `save`, or a new one if it has none")
            .of_rank_0(),
        toggle("overwrite", spec.overwrite, "`save` may write over another training's files")
            .of_rank_0(),
    };
}

std::vector<Setting> report_settings(RunSpec& run) {
    ReportSpec& spec = run.reports;
    return {
        metrics_setting(spec.metrics).of_rank_0(),
        path("tensorboard", spec.tensorboard, "DIR",
             "The same for TensorBoard, in a new event file in this folder")
            .of_rank_0(),
        path("trace", spec.trace, "FILE",
             "Write what each rank computes, sends and waits for in a few steps to this JSON file, "
             "for ui.perfetto.dev")
            .of_rank_0(),
        trace_steps_setting(spec.trace_steps).may_change(),
        number("log-interval", spec.log_interval, {.least = 1},
               "Steps between two lines of progress")
            .may_change(),
        toggle("quiet", spec.quiet, "Print errors and warnings only")
            .abbreviated("q")
            .of_each_rank(),
    };
}

}  // namespace

Setting model_setting(RunSpec& run, string help) {
    if (help.empty()) {
        help = fmt::format("A built-in net ({}) or a model file",
                           fmt::join(model::builtin_models(), ", "));
    }
    return path("model", run.net.model, "NAME|FILE", std::move(help));
}

Setting views_setting(RunSpec& run) {
    return choice("tta", run.evaluation.views, kViews,
                  "Test-time augmentation: look at each image and at its mirror image, too "
                  "(hflip), and take the mean of their logits");
}

Setting precision_setting(RunSpec& run) {
    return choice(
        "precision", run.net.precision, kPrecisions,
        "What is computed in: fp32; tf32: on GPUs, operands of convolutions and linear layers are "
        "rounded for tensor cores; bf16, fp16: activations and their gradients in 16 bits, sums, "
        "weights and updates in fp32, the loss scaled for fp16");
}

Setting threads_setting(RunSpec& run) {
    return number("threads", run.device.threads, {0, 1024},
                  "Threads per rank; 0: this rank's share of the processors")
        .of_each_rank();
}

Setting device_setting(RunSpec& run, string help) {
    return choice("device", run.device.device, {"auto", "cpu", "cuda", "emulated"}, std::move(help))
        .may_change();
}

Setting optimizer_setting(RunSpec& run, string help) {
    Words<UpdateRule> words;
    for (const UpdateRuleFacts& rule : kUpdateRules) {
        words.emplace_back(rule.name, static_cast<UpdateRule>(words.size()));
    }
    return choice("optimizer", run.optimizer.rule, words, std::move(help));
}

Setting bucket_setting(RunSpec& run) {
    std::optional<std::int64_t>& bytes = run.reduction.bucket_bytes;
    return custom(
        "bucket-kib", "N|auto", "Size of a gradient bucket in KiB, or auto",
        [&bytes](const string& text) {
            std::int64_t kib = 0;
            if (text == "auto") {
                bytes.reset();
            } else if (read_number(text, kib, {1, std::int64_t{1} << 50}).empty()) {
                bytes = kib * 1024;
            } else {
                return fmt::format("'{}' must be auto or >= 1", text);
            }
            return string();
        },
        [&bytes] { return bytes ? fmt::format("{}", *bytes / 1024) : "auto"; });
}

std::vector<Setting> data_settings(RunSpec& run) {
    DataSpec& data = run.data;
    return under(
        "Data",
        {path("data", data.path, "NAME|DIR",
              "Data set: a name such as fashion-mnist or mnist, or a folder")
             .of_each_rank(),  // what is there is compared
         number("classes", data.classes, {.least = 2},
                "Number of classes, if not the largest label + 1"),
         resize_setting(data.resize),
         number("skip-bad", data.skip_bad, {.least = 0, .most = data::ImageCache::kMostLeftOut},
                "Leave out up to so many pictures that cannot be read, and name them"),
         numbers("mean", data.mean, {},
                 "Mean of the pixels in [0, 1], one or one per channel; measured if absent"),
         numbers("std", data.stddev, {},
                 "Standard deviation of the pixels, like `mean`; measured if absent"),
         number("test-batch-size", run.evaluation.batch_size, {.least = 1},
                "Images per rank in an evaluation pass"),
         views_setting(run)});
}

std::vector<Setting> rank_settings(RunSpec& run) {
    LaunchSpec& launch = run.launch;
    return under(
        "Ranks",
        {choice("comm", launch.comm, {"auto", "nccl", "mpi", "gloo"},
                "What gradients are reduced over: nccl (CUDA GPUs), mpi, gloo (without mpirun), or "
                "auto: NCCL where the ranks have GPUs and it is found, memory that the ranks share "
                "where all are on one host, otherwise as started")
             .may_change(),
         init_method_setting(launch.init_method).of_each_rank(),
         number("rank", launch.rank, {.least = 0},
                "This process among the ranks, from 0, if no launcher says it")
             .of_each_rank(),
         number("world-size", launch.world_size, {.least = 1},
                "Number of ranks, if no launcher says it")
             .may_change(),
         text("job-id", launch.job_id, "TEXT",
              "Any text, the same on all ranks: keeps jobs apart that meet at one place")
             .may_change(),
         toggle("insecure", launch.insecure,
                "Meet over TCP without a secret (GYRE_SECRET), where other hosts reach it")
             .of_each_rank(),
         number("init-timeout", launch.init_timeout, {.least = 0.1},
                "Seconds until all ranks must have met and MPI have started, and until NCCL must "
                "have connected them")
             .of_each_rank(),
         number("timeout", launch.timeout, {.least = 1.0},
                "Seconds that a rank waits for the others before the job is ended")
             .may_change(),
         threads_setting(run)});
}

std::vector<Setting> device_settings(RunSpec& run) {
    DeviceSpec& device = run.device;
    return under(
        "GPU",
        {device_setting(run,
                        "auto (a GPU where there is one), cpu, cuda, or emulated: the CUDA kernels "
                        "run on the CPU, slowly"),
         no_cuda_setting(device.device),
         choice("kernels", device.kernels, {"ours", "cudnn", "auto"},
                "On GPUs: ours, cudnn (and cuBLAS), or auto: the faster of both for each layer"),
         path("kernels-cache", device.kernels_cache, "FILE",
              "With `kernels` auto: keep the timings in this file")
             .of_each_rank(),
         toggle("deterministic", device.deterministic,
                "On GPUs: libraries use only deterministic algorithms; gyre's own always are"),
         toggle("share-gpu", run.launch.share_gpu,
                "Ranks may share a GPU: to try things out; otherwise that is refused")
             .may_change()});
}

std::vector<Setting> diagnosis_settings(RunSpec& run) {
    return under(
        "Diagnosis",
        {path("flight-record", run.launch.flight_record, "PATH",
              "On failure each rank writes its last collectives to this path plus .rankN.json")
             .of_each_rank()});
}

std::vector<Setting> settings(RunSpec& run) {
    std::vector<Setting> all;
    const auto add = [&](std::vector<Setting> rows) {
        all.insert(all.end(), rows.begin(), rows.end());
    };
    add(data_settings(run));
    add(under("Data",
              {number("limit", run.data.limit, {.least = 1}, "Train on the first N images only"),
               number("val-split", run.data.val_split, {.least = 0.001, .most = 0.9},
                      "Hold this part of the training images out: they say which epoch is the best "
                      "and when to stop, and the test images are evaluated once, at the end"),
               toggle("balanced-sampler", run.data.balanced,
                      "Repeat the training images of smaller classes until each class has as many "
                      "as the largest; each copy is a sample of its own, with its own augmentation "
                      "and dropout")}));
    add(under("Model", model_settings(run)));
    add(under("Training", length_settings(run)));
    add(under("Training", optimizer_settings(run)));
    add(rank_settings(run));
    add(under("Ranks", reduction_settings(run)));
    add(device_settings(run));
    add(under("GPU", graph_settings(run)));
    add(under("Output", checkpoint_settings(run)));
    add(under("Output", report_settings(run)));
    add(diagnosis_settings(run));
    add(under("Diagnosis",
              {number("check-sync", run.reports.check_sync, {.least = 0},
                      "Compare the parameters of all ranks every N steps; 0: never")
                   .may_change(),
               number("audit", run.reports.audit, {.least = 0},
                      "Every N steps let a second rank compute one shard's gradients too, and "
                      "compare to the bit; 0: never")
                   .may_change(),
               toggle("audit-warn", run.reports.audit_warns,
                      "Tell of a difference that `audit` finds, and train on")
                   .may_change(),
               toggle("verbose", run.reports.verbose, "Print the net, the buckets and the backend")
                   .abbreviated("v")
                   .instead_of("quiet")
                   .of_each_rank()}));
    return all;
}

std::vector<SettingValue> values_of(RunSpec run) {
    RunSpec none;
    const std::vector<Setting> rows = settings(run), defaults = settings(none);
    std::vector<SettingValue> values;
    for (std::size_t i = 0; i < rows.size(); ++i) {
        const string value = rows[i].value();
        values.push_back({rows[i].name, value, value != defaults[i].value(), rows[i].scope,
                          rows[i].must_match_on_resume()});
    }
    return values;
}

const SettingValue* find(const std::vector<SettingValue>& values, std::string_view name) {
    const auto found = std::ranges::find(values, name, &SettingValue::name);
    return found == values.end() ? nullptr : &*found;
}

Values values_to_resume(RunSpec run) {
    run.batch.automatic_shards = false;  // a number that is still open counts as 0
    Values values;
    for (const SettingValue& setting : values_of(run)) {
        if (setting.must_match_on_resume && !setting.value.empty()) {
            values[setting.name] = setting.value;
        }
    }
    return values;
}

}  // namespace gyre::train
