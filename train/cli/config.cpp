#include "train/cli/config.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <set>
#include <sstream>

#include "base/error.hpp"
#include "model/whole_file.hpp"
#include "train/cli/command_line.hpp"
#include "train/nearest.hpp"
#include "train/settings.hpp"

namespace gyre::train {
namespace {

struct Config {
    const char *name, *text;
};
constexpr Config kConfigs[] = {
    {"mnist99",
     "# 99 % of MNIST's test images in the least time. Tuned on the last 10,000 training images\n"
     "# (bench/mnist99.py --tune).\n"
     "data = \"mnist\"\n"
     "model = \"net\"\n"
     "no-dropout = true\n"
     "epochs = 3\n"
     "global-batch = 256\n"
     "optimizer = \"adam\"\n"
     "betas = [0.7, 0.9]\n"
     "lr = 0.01\n"
     "lr-schedule = \"one-cycle\"\n"},
    {"cifar10",
     "# CIFAR-10 in ten epochs, after K. Jordan, \"94% on CIFAR-10 in 3.29 Seconds on a Single\n"
     "# GPU\", 2024. There the logits are divided by 9; here fc1 begins and learns as if they "
     "were.\n"
     "# A norm's bias learns 64 times as fast as the rest and decays as slowly.\n"
     "model = \"airbench\"\n"
     "weight-init = \"dirac\"\n"
     "init-scale = [\"conv1.bias=0\", \"fc1.*=0.1111\"]\n"
     "whiten = \"conv1\"\n"
     "freeze = [\"conv1.weight\", \"bn*.weight\"]\n"
     "epochs = 10\n"
     "global-batch = 1024\n"
     "optimizer = \"sgd\"\n"
     "lr = 1.5\n"
     "lr-scale = [\"bn*.bias=64\", \"fc1.*=0.0123\"]\n"
     "lr-schedule = \"one-cycle\"\n"
     "momentum = 0.85\n"
     "nesterov = true\n"
     "weight-decay = 0.00133\n"
     "weight-decay-scale = [\"bn*.bias=0.015625\", \"fc1.*=81\"]\n"
     "label-smoothing = 0.2\n"
     "augment = [\"altflip\", \"shift2\"]\n"
     "tta = \"hflip\"\n"},
};

constexpr const char* kFlag = "--config";

std::string text_of(const std::string& config) {
    for (const Config& known : kConfigs) {
        if (config == known.name) {
            return known.text;
        }
    }
    std::string why;
    const auto text = model::read_text(config, why);
    if (!text) {
        throw usage_error(fmt::format(
            "{}: {} is not a file that can be read ({}), nor a name of a configuration ({}){}",
            kFlag, config, why, fmt::join(config_names(), ", "),
            did_you_mean(config, config_names())));
    }
    return *text;
}

// The flag of a word such as --lr or --lr=0.1, or nothing.
std::string flag_of(const std::string& word) {
    return word.starts_with("--") ? word.substr(0, word.find('=')) : std::string{};
}

// A setting from a file, as a word, with its place there.
struct FileFlag {
    std::string word, where;
};

// The place of the line that gives a setting.
std::string place_of(const std::string& key, const std::string& config, const std::string& text) {
    std::istringstream lines(text);
    int number = 0;
    for (std::string line; std::getline(lines, line);) {
        ++number;
        const std::size_t begin = std::min(line.find_first_not_of(" \t\""), line.size());
        const std::size_t end = std::min(line.find_first_of(" \t\"=", begin), line.size());
        if (line.substr(begin, end - begin) == key) {
            return fmt::format("config {}, line {}", config, number);
        }
    }
    return fmt::format("config {}, {}", config, key);
}

std::vector<FileFlag> flags_of(const std::string& config) {
    const std::string text = text_of(config);
    std::istringstream in(text);
    std::vector<FileFlag> flags;
    try {
        for (const CLI::ConfigItem& item : CLI::ConfigBase().from_config(in)) {
            const std::string where = place_of(item.name, config, text);
            const bool section = item.name == "++" || item.name == "--";
            if (!item.parents.empty() && item.parents != std::vector<std::string>{"train"}) {
                throw usage_error(fmt::format("config {}, {}: the only section is [train]", config,
                                              item.fullname()));
            }
            if (item.name == "config" || item.name == "recipe") {
                throw usage_error(fmt::format("{}: a file cannot name another", where));
            }
            if (!section) {
                flags.push_back(
                    {fmt::format("--{}={}", item.name, fmt::join(item.inputs, ",")), where});
            }
        }
    } catch (const CLI::Error& error) {
        throw usage_error(fmt::format("config {}: {}", config, error.what()));
    }
    return flags;
}

// Throws Error(usage) for a value that the setting does not take.
void check_value(const std::vector<Setting>& rows, const std::string& word) {
    const std::string flag = flag_of(word);
    const Setting* const row = find(rows, flag.substr(2));
    if (row == nullptr) {
        return;  // --help, which is answered later
    }
    if (const std::string problem = row->set(word.substr(flag.size() + 1)); !problem.empty()) {
        throw usage_error(fmt::format("{}: {}", flag, problem));
    }
}

// The setting that a flag decides: that which it is short for or stands instead of, or its own.
std::string meaning(const std::vector<Setting>& rows, const std::string& flag) {
    const Setting* const row = flag.empty() ? nullptr : find(rows, flag.substr(2));
    return row == nullptr            ? flag
           : !row->short_for.empty() ? row->short_for
           : !row->excludes.empty()  ? row->excludes.front()
                                     : row->name;
}

}  // namespace

std::vector<std::string> config_names() {
    std::vector<std::string> names;
    for (const Config& config : kConfigs) {
        names.emplace_back(config.name);
    }
    return names;
}

std::vector<std::string> with_config(const CLI::App& app, const std::vector<std::string>& words) {
    std::vector<std::string> all, configs;
    for (std::size_t i = 0; i < words.size(); ++i) {
        const bool joined = words[i].size() > flag_of(words[i]).size();
        if (flag_of(words[i]) != kFlag || (!joined && i + 1 == words.size())) {
            all.push_back(words[i]);  // a flag without a value is refused by the parser
        } else {
            configs.push_back(joined ? words[i].substr(words[i].find('=') + 1) : words[++i]);
        }
    }
    RunSpec scratch;
    const std::vector<Setting> rows = settings(scratch);
    std::set<std::string> given;
    for (const std::string& word : all) {
        given.insert(meaning(rows, flag_of(word)));
    }
    for (auto config = configs.rbegin(); config != configs.rend(); ++config) {
        std::set<std::string> new_ones;
        for (const FileFlag& flag : flags_of(*config)) {
            std::string word;
            try {
                const auto translated = translate_arguments(app, {all.front(), flag.word});
                if (translated.size() < 2) {
                    continue;  // a launcher's, which the environment repeats
                }
                word = translated.back();
                check_value(rows, word);
            } catch (const Error& error) {
                throw usage_error(fmt::format("{}: {}", flag.where, error.what()));
            }
            const std::string what = meaning(rows, flag_of(word));
            if (!given.contains(what)) {
                new_ones.insert(what);
                all.push_back(word);
            }
        }
        given.merge(new_ones);
    }
    return all;
}

}  // namespace gyre::train
