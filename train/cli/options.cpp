#include "train/cli/options.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstdio>

#include "base/error.hpp"
#include "train/cli/config.hpp"
#include "train/special_settings.hpp"

namespace gyre::train {
namespace {

constexpr const char* kSavedWeights = "Weights that gyre train --save has written";

std::vector<Setting> under(const char* heading, std::vector<Setting> rows) {
    for (Setting& row : rows) {
        row.heading = heading;
    }
    return rows;
}

std::vector<Setting> joined(std::initializer_list<std::vector<Setting>> parts) {
    std::vector<Setting> all;
    for (const std::vector<Setting>& part : parts) {
        all.insert(all.end(), part.begin(), part.end());
    }
    return all;
}

Setting image_setting(Shape& field) {
    return custom(
        "image", "CxHxW", "Channels, rows and columns of the images",
        [&field](const std::string& text) {
            Shape image;
            char end = 0;
            if (std::sscanf(text.c_str(), "%dx%dx%d%c", &image.channels, &image.height,
                            &image.width, &end) != 3 ||
                std::min({image.channels, image.height, image.width}) < 1 ||
                std::max({image.channels, image.height, image.width}) > 1 << 14) {
                return fmt::format("'{}' must be channels, rows and columns such as 3x32x32", text);
            }
            field = image;
            return std::string();
        },
        [&field] { return fmt::format("{}x{}x{}", field.channels, field.height, field.width); });
}

// A number in this unit or others, read by `parse`, which throws Error.
Setting quantity(std::string name, double& field, const char* unit,
                 double (*parse)(const std::string&), std::string help) {
    return custom(
        std::move(name), "TEXT", std::move(help),
        [&field, parse](const std::string& text) -> std::string {
            try {
                field = parse(text);
            } catch (const Error& error) {
                return error.what();
            }
            return {};
        },
        [&field, unit] { return field > 0.0 ? fmt::format("{}{}", field, unit) : std::string(); });
}

Setting compute_setting(std::vector<double>& field) {
    Setting row = numbers("compute-ms", field, {.least = 1e-9},
                          "Milliseconds of the forward and backward pass and, optionally, of the "
                          "update, instead of measuring them here");
    row.max_words = 3;
    row.set = [read = row.set, &field](const std::string& text) {
        std::string problem = read(text);
        if (problem.empty() && (field.size() < 2 || field.size() > 3)) {
            problem = fmt::format("'{}' must be two or three numbers, such as 2,4,0.5", text);
        }
        return problem;
    };
    return row;
}

}  // namespace

std::vector<Setting> train_flags(RunSpec& o) {
    std::vector<Setting> rows = settings(o);
    // The program has read it before the other flags, and has put its settings among them.
    const Setting config =
        custom(
            "config", "NAME|FILE",
            fmt::format("Settings under a name ({}), or in a TOML file, such as `lr = 0.1`; flags "
                        "given here override them, a later --config an earlier one (--recipe is "
                        "the same)",
                        fmt::join(config_names(), ", ")),
            [](const std::string&) { return std::string(); }, [] { return std::string(); })
            .of_each_rank();
    const auto training = std::find_if(
        rows.begin(), rows.end(), [](const Setting& row) { return row.heading == "Training"; });
    rows.insert(training, under("Training", {config}).front());
    return rows;
}

// Options of the commands that repeat a training from its receipt. own: of one of them.
std::vector<Setting> repetition_flags(VerifyOptions& o, const char* start, const Setting& own) {
    return joined(
        {{path("run", o.run, "DIR", "The folder of gyre train --save, with its receipt.jsonl")
              .is_required()
              .without_flag(),
          path("from", o.from, "FILE",
               fmt::format("Begin at this checkpoint of the training instead of {}", start))
              .of_rank_0(),
          own},
         under("Data", {path("data", o.data.path, "NAME|DIR",
                             "The data set, if it is elsewhere now [as the training had it]")
                            .of_each_rank()}),
         rank_settings(o),
         under("GPU", {device_setting(o, "auto (as the training had it), cpu, cuda, or emulated")}),
         diagnosis_settings(o)});
}

std::vector<Setting> verify_flags(VerifyOptions& o) {
    return repetition_flags(
        o, "its start",
        path("to", o.to, "FILE", "End at this checkpoint of the training instead of its end")
            .of_rank_0());
}

std::vector<Setting> replay_flags(ReplayOptions& o) {
    return repetition_flags(
        o, "the last numbered one before the step, or the training's start",
        number("step", o.step, {.least = 1}, "The step to show, counted from 1 over all epochs")
            .is_required());
}

std::vector<Setting> eval_flags(EvalOptions& o) {
    return joined(
        {data_settings(o),
         under("Model",
               {path("weights", o.weights, "FILE", "Weights to evaluate: a safetensors file")
                    .is_required(),
                model_setting(o, "Model, if the weights file does not hold it [net]"),
                precision_setting(o),
                number("virtual-ranks", o.shards, {.least = 0, .most = kMostShards},
                       "Parts whose losses are added up in one order, on any number of ranks from "
                       "1 to that; 0: not [as the weights were trained]"),
                number("shards", o.shards, {.least = 0, .most = kMostShards},
                       "The same as `virtual-ranks`")
                    .standing_for("virtual-ranks")}),
         rank_settings(o), device_settings(o),
         under(
             "Output",
             {toggle("per-class", o.per_class, "Images, recall and precision of each class"),
              toggle("confusion", o.confusion, "Which class was taken for which, and how often")}),
         diagnosis_settings(o)});
}

std::vector<Setting> plan_flags(PlanOptions& o) {
    static const Words<AllreduceAlgorithm> kAlgorithms = {{"auto", AllreduceAlgorithm::fastest},
                                                          {"ring", AllreduceAlgorithm::ring},
                                                          {"tree", AllreduceAlgorithm::tree}};
    return {
        model_setting(o),
        number("batch-size", o.batch.batch_size, {.least = 1}, "Images per rank in a step"),
        numbers("ranks", o.ranks, {.least = 1}, "Numbers of ranks to plan for, such as 8,64,1024")
            .is_required(),
        quantity("bandwidth", o.link.bytes_per_second, "B", parse_bandwidth,
                 "Payload of a rank's link, each way: 400Gb (bits a second) or 50GB (bytes a "
                 "second); TCP carries 95 % of an Ethernet's")
            .is_required(),
        quantity("latency", o.link.latency_seconds, "s", parse_latency,
                 "Time of an empty message between two ranks, such as 5us")
            .is_required(),
        image_setting(o.image),
        number("classes", o.data.classes, {.least = 2}, "Number of classes"),
        compute_setting(o.compute_ms),
        optimizer_setting(o, "Whose update is measured"),
        device_setting(o, "What is measured"),
        precision_setting(o),
        threads_setting(o),
        choice("algorithm", o.algorithm, kAlgorithms,
               "ring, tree (double binary) or auto: the faster of both for each bucket"),
        bucket_setting(o),
        path("json", o.json, "FILE", "Write the plan to this file").of_rank_0(),
    };
}

std::vector<Setting> info_flags(InfoOptions& o) {
    return {path("model", o.model, "NAME|FILE",
                 fmt::format("Show this net layer by layer: a built-in one ({}) or a model file",
                             fmt::join(builtin_models(), ", "))),
            image_setting(o.image),
            number("classes", o.classes, {.least = 2}, "Number of classes"),
            path("weights", o.weights, "FILE", "Show what is in this safetensors file")
                .instead_of("model"),
            path("checkpoint", o.checkpoint, "FILE",
                 "Check that a training can be resumed from this file, and show what is in it")
                .instead_of("model")
                .instead_of("weights"),
            toggle("commands", o.commands, "Print all subcommands and their options as JSON")
                .instead_of("model")
                .instead_of("weights")
                .instead_of("checkpoint")};
}

std::vector<Setting> predict_flags(PredictOptions& o) {
    return {
        path("weights", o.weights, "FILE", kSavedWeights).is_required(),
        paths("image", o.images, "FILE", "PNG, JPEG and WebP files, and IDX files of images")
            .is_required()
            .without_flag(),
        number("top", o.top, {.least = 1}, "Classes to name for each image, the likeliest first"),
        toggle("csv", o.csv, "Print rows of image, place, class, name and probability"),
        device_setting(o, "Where to compute"),
        views_setting(o),
        precision_setting(o),
        threads_setting(o)};
}

std::vector<Setting> export_flags(ExportOptions& o) {
    return {path("weights", o.weights, "FILE", kSavedWeights).is_required(),
            path("onnx", o.onnx, "FILE", "The ONNX model to write: the net as it evaluates")
                .is_required()};
}

std::vector<Setting> import_flags(ImportOptions& o) {
    Setting resize = resize_setting(o.resize);
    resize.help = "How gyre eval and gyre predict bring images to the net's size [as in the file]";
    return {path("net", o.net, "FILE", "The ONNX model").is_required().without_flag(),
            path("output", o.output, "DIR", "The folder for net.model and net.safetensors")
                .abbreviated("o")
                .is_required(),
            text("mean", o.mean, "M,M,M",
                 "What is subtracted from pixels of 0 to 1, by channel [as in the file, or 0]"),
            text("std", o.std, "S,S,S", "What they are divided by then [as in the file, or 1]"),
            resize};
}

std::vector<Setting> diff_flags(DiffOptions& o) {
    const char* const help = "A .safetensors file or, for its last.safetensors, a folder of --save";
    return {path("first", o.first, "PATH", help).is_required().without_flag(),
            path("second", o.second, "PATH", help).is_required().without_flag()};
}

std::vector<Setting> plot_flags(PlotOptions& o) {
    return {
        paths("run", o.runs, "FILE", "Files of gyre train --metrics").is_required().without_flag(),
        path_ending_in("output", o.output, {".svg", ".png"}, "The picture, by the file's ending")
            .abbreviated("o")
            .is_required()};
}

std::string nnodes_text(const comm::NodesSpec& hosts) {
    return hosts.least == hosts.most ? std::to_string(hosts.most)
                                     : fmt::format("{}:{}", hosts.least, hosts.most);
}

namespace {

Setting nnodes_setting(comm::NodesSpec& hosts) {
    return custom(
        "nnodes", "MIN:MAX",
        "Number of hosts, on each of which gyre launch runs; or the least and the most of a job "
        "that "
        "trains on without hosts that are lost, and with those that come",
        [&hosts](const std::string& given) {
            const std::size_t colon = given.find(':');
            int least = 0, most = 0;
            const Bounds<int> bounds{1, 1024};
            const bool good = read_number(given.substr(0, colon), least, bounds).empty() &&
                              (colon == std::string::npos ||
                               read_number(given.substr(colon + 1), most, bounds).empty());
            most = colon == std::string::npos ? least : most;
            if (!good || most < least) {
                return fmt::format(
                    "'{}' must be a number of hosts from 1 to 1024, or the least and the most, as "
                    "in 2:4",
                    given);
            }
            hosts.least = least;
            hosts.most = most;
            return std::string();
        },
        [&hosts] { return nnodes_text(hosts); });
}

}  // namespace

std::vector<Setting> launch_flags(LaunchCommandOptions& o) {
    return {
        number("nproc-per-node", o.ranks, {1, 1024}, "Number of ranks").abbreviated("n"),
        toggle("gpus", o.gpus, "One rank for each GPU of this host").instead_of("nproc-per-node"),
        nnodes_setting(o.job.hosts),
        number("node-rank", o.node, {0, 1023},
               "This host's number among them, from 0, which has rank 0"),
        text("master-addr", o.job.hosts.master_addr, "HOST",
             "Address of the host with node-rank 0, where the hosts meet"),
        number("master-port", o.job.hosts.master_port, {1, 65535},
               "A free port there, for the hosts; the ranks meet at another one"),
        number("rejoin-timeout", o.job.hosts.rejoin_timeout, {.least = 0.0},
               "Seconds that a start waits for hosts without which it could begin"),
        number(
            "max-restarts", o.job.max_restarts, {.least = 0},
            "Start all ranks again, up to N times, where one was killed, has crashed or lost the "
            "others; a training with --save DIR --resume auto then resumes")};
}

}  // namespace gyre::train
