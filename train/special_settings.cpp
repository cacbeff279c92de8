#include "train/special_settings.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <filesystem>
#include <map>
#include <vector>

#include "data/resize.hpp"
#include "train/augment.hpp"

namespace gyre::train {

Setting resize_setting(std::optional<Resize>& field) {
    return custom(
        "resize", "HxW|N,centercropM",
        "Bring all images to this size: all of an image, or the middle M x M (or MxM) pixels after "
        "its shorter side has become N; without it they must agree",
        [&field](const std::string& text) {
            Resize to;
            std::string problem = read_resize(text, to);
            if (problem.empty()) {
                field = to;
            }
            return problem;
        },
        [&field] { return field ? resize_text(*field) : std::string(); });
}

Setting init_method_setting(std::string& field) {
    return custom(
        "init-method", "URL",
        "Where the ranks meet: mpi, env:// (MASTER_ADDR, MASTER_PORT), tcp://HOST:PORT (rank 0 "
        "listens there), or file:///PATH (a new folder that all see) [as the launcher says]",
        [&field](const std::string& text) {
            if (text != "mpi" && text != "env://" && !text.starts_with("tcp://") &&
                !text.starts_with("file://")) {
                return fmt::format("'{}' must be mpi, env://, tcp://HOST:PORT or file:///PATH",
                                   text);
            }
            field = text;
            return std::string();
        },
        [&field] { return field; });
}

// A short form of `device` cpu.
Setting no_cuda_setting(std::string& device) {
    return custom(
               "no-cuda", "", "The same as `device` cpu",
               [&device](const std::string& text) {
                   if (text == "true" && (device == "cuda" || device == "emulated")) {
                       return fmt::format("it contradicts `device` {}; leave one of them out",
                                          device);
                   }
                   device = text == "true" ? "cpu" : device;
                   return std::string();
               },
               [&device] { return device == "cpu" ? "true" : "false"; })
        .standing_for("device");
}

Setting betas_setting(OptimizerSpec& spec) {
    std::optional<std::array<float, 2>>& field = spec.betas;
    Setting row = custom(
        "betas", "B1,B2", "Coefficients of the moments [adam and adamw 0.9,0.999; lion 0.9,0.99]",
        [&field](const std::string& text) {
            std::vector<float> values;
            std::string problem = read_numbers(text, values, {0.0f, kBelowOne});
            if (problem.empty() && values.size() != 2) {
                problem = fmt::format("'{}' must be two numbers, such as 0.9,0.999", text);
            }
            if (problem.empty()) {
                field = {values[0], values[1]};
            }
            return problem;
        },
        [&spec] {
            const auto [first, second] = spec.betas.value_or(facts(spec.rule).betas);
            return fmt::format("{},{}", first, second);
        });
    row.max_words = 2;
    return row;
}

Setting virtual_ranks_setting(std::string name, BatchSpec& field, std::string help) {
    return custom(
        std::move(name), "auto|INT", std::move(help),
        [&field](const std::string& text) {
            int shards = 0;
            std::string problem =
                text == "auto" ? "" : read_number(text, shards, {.least = 0, .most = kMostShards});
            if (problem.empty()) {
                field.shards = shards;
                field.automatic_shards = text == "auto";
            }
            return problem;
        },
        [&field] {
            return field.shards > 0         ? fmt::format("{}", field.shards)
                   : field.automatic_shards ? std::string("auto")
                                            : std::string("0");
        });
}

Setting class_weights_setting(LossSpec& field) {
    Setting row = numbers(
        "class-weights", field.class_weights, {.least = 0.0f},
        "Multiply the loss of an image by its class's weight: auto (by one over the class's number "
        "of training images), or a number for each class; they are divided by their mean over the "
        "training images");
    row.type = "auto|W,W,...";
    row.set = [&field, set = row.set](const std::string& text) {
        field.balanced = text == "auto";
        field.class_weights.clear();
        return field.balanced ? std::string() : set(text);
    };
    row.value = [&field, value = row.value] {
        return field.balanced ? std::string("auto") : value();
    };
    return row;
}

Setting augment_setting(AugmentSpec& field) {
    return custom(
        "augment", "LIST",
        "Change training images, differently in every epoch: any of shiftN and cropN (up to N "
        "pixels; the edge, or 0, beyond it), rotateN (up to N degrees), hflip, altflip (in turns), "
        "cutoutN (N x N "
        "pixels), randomresizedcropN (at least N % of the area), randomerasingN (of N % of the "
        "images), mixupA and cutmixA (with another image; A: Beta's alpha, up to 1); or none",
        [&field](const std::string& text) { return read_augment(text, field); },
        [&field] { return augment_text(field); });
}

Setting save_every_setting(SaveEvery& field) {
    return custom(
        "save-every", "N[steps|s]",
        "Epochs between two checkpoints, or steps, as in 500steps, or seconds, as in 30s",
        [&field](const std::string& text) {
            static const std::map<std::string, SaveEvery::Unit> kUnits = {
                {"", SaveEvery::Unit::epochs},       {"epoch", SaveEvery::Unit::epochs},
                {"epochs", SaveEvery::Unit::epochs}, {"step", SaveEvery::Unit::steps},
                {"steps", SaveEvery::Unit::steps},   {"s", SaveEvery::Unit::seconds}};
            SaveEvery every;
            const std::size_t digits = std::min(text.find_first_not_of("0123456789"), text.size());
            const auto unit = kUnits.find(text.substr(digits));
            if (!read_number(text.substr(0, digits), every.count, {.least = 1}).empty() ||
                unit == kUnits.end()) {
                return fmt::format(
                    "'{}' must be a number of epochs, as 2, of steps, as 500steps, "
                    "or of seconds, as 30s",
                    text);
            }
            every.unit = unit->second;
            field = every;
            return std::string();
        },
        [&field] {
            constexpr const char* kUnits[] = {"", "steps", "s"};
            return fmt::format("{}{}", field.count, kUnits[static_cast<std::size_t>(field.unit)]);
        });
}

// A file without an ending, such as a pipe, gets JSON lines.
Setting metrics_setting(std::string& field) {
    Setting row =
        path("metrics", field, "FILE.csv|FILE.jsonl",
             "Write the progress to this file: .csv, a row for each step and epoch; .jsonl, JSON "
             "lines");
    row.set = [set = row.set](const std::string& text) {
        const std::string ending = std::filesystem::path(text).extension().string();
        return ending.empty() || ending == ".csv" || ending == ".jsonl" || ending == ".json"
                   ? set(text)
                   : fmt::format("'{}' must end in .csv or .jsonl", text);
    };
    return row;
}

Setting trace_steps_setting(TraceSteps& field) {
    return custom(
        "trace-steps", "FIRST-LAST", "Which steps, counted over all epochs",
        [&field](const std::string& text) {
            TraceSteps steps;
            char end = 0;
            const int read =
                std::sscanf(text.c_str(), "%ld-%ld%c", &steps.first, &steps.last, &end);
            steps.last = read == 1 ? steps.first : steps.last;
            if (read < 1 || read > 2 || steps.first < 1 || steps.last < steps.first ||
                steps.last - steps.first >= 1000 ||
                text.find_first_not_of("0123456789-") != text.npos) {
                return fmt::format("'{}' must be a step or at most 1000 of them, from 1, as 11-14",
                                   text);
            }
            field = steps;
            return std::string();
        },
        [&field] { return fmt::format("{}-{}", field.first, field.last); });
}

}  // namespace gyre::train
