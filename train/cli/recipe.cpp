#include "train/cli/recipe.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <fstream>
#include <set>
#include <sstream>

#include "kernels/base/error.hpp"
#include "train/cli/command_line.hpp"
#include "train/cli/nearest.hpp"

namespace gyre::train {
namespace {

struct Recipe {
    const char *name, *text;
};
constexpr Recipe kRecipes[] = {
    {"mnist99",
     "# 99 % of MNIST's test images in the least time. Tuned on the last 10,000 training images\n"
     "# (bench/mnist99.py --tune).\n"
     "--data mnist\n"
     "--model net\n"
     "--no-dropout\n"
     "--epochs 3\n"
     "--global-batch 256\n"
     "--optimizer adam\n"
     "--betas 0.7,0.9\n"
     "--lr 0.01\n"
     "--lr-schedule one-cycle\n"},
};

// Both say how many images a step has.
std::string meaning(const std::string& flag) {
    return flag == "--batch-size" ? "--global-batch" : flag;
}

std::string text_of(const std::string& recipe) {
    for (const Recipe& known : kRecipes) {
        if (recipe == known.name) {
            return known.text;
        }
    }
    std::ifstream file(recipe);
    std::stringstream text;
    if (!file || !(text << file.rdbuf())) {
        throw usage_error(
            fmt::format("--recipe: {} is no file that can be read, and no recipe ({}){}", recipe,
                        fmt::join(recipe_names(), ", "), did_you_mean(recipe, recipe_names())));
    }
    return text.str();
}

// A line's flag and its value, as words; none for a comment.
std::vector<std::string> words_of(std::string line) {
    line.resize(std::min(line.find('#'), line.size()));
    std::istringstream in(line);
    std::vector<std::string> words;
    for (std::string word; in >> word;) {
        words.push_back(word);
    }
    return words;
}

// The flag of a word such as --lr or --lr=0.1, or nothing.
std::string flag_of(const std::string& word) {
    return word.starts_with("--") ? word.substr(0, word.find('=')) : std::string{};
}

}  // namespace

std::vector<std::string> recipe_names() {
    std::vector<std::string> names;
    for (const Recipe& recipe : kRecipes) {
        names.emplace_back(recipe.name);
    }
    return names;
}

namespace {

// The value of a flag among the words; empty where it is not there, or without a value, which the
// parser refuses.
std::string value_of(const std::string& flag, const std::vector<std::string>& words) {
    for (std::size_t i = 0; i < words.size(); ++i) {
        if (flag_of(words[i]) == flag) {
            const bool joined = words[i].size() > flag.size();
            return joined                 ? words[i].substr(flag.size() + 1)
                   : i + 1 < words.size() ? words[i + 1]
                                          : std::string{};
        }
    }
    return {};
}

// A flag from a file, as words, with where it stands there.
struct FileFlag {
    std::vector<std::string> words;
    std::string where;
};

std::vector<FileFlag> flags_of_recipe(const std::string& recipe) {
    std::vector<FileFlag> flags;
    std::istringstream text(text_of(recipe));
    int number = 0;
    for (std::string line; std::getline(text, line);) {
        ++number;
        if (std::vector<std::string> words = words_of(line); !words.empty()) {
            const std::string where = fmt::format("recipe {}, line {}", recipe, number);
            if (flag_of(words.front()).empty() || flag_of(words.front()) == "--recipe") {
                throw usage_error(
                    fmt::format("{}: '{}' is not a flag of `gyre train` such as --lr 0.1", where,
                                words.front()));
            }
            flags.push_back({std::move(words), where});
        }
    }
    return flags;
}

std::vector<FileFlag> flags_of_config(const std::string& path) {
    std::ifstream file(path);
    std::stringstream text;
    if (!file || !(text << file.rdbuf())) {
        throw usage_error(fmt::format("--config: {} is no file that can be read", path));
    }
    std::vector<FileFlag> flags;
    try {
        for (const CLI::ConfigItem& item : CLI::ConfigBase().from_config(text)) {
            const std::string where = fmt::format("config {}, {}", path, item.fullname());
            const bool section = item.name == "++" || item.name == "--";
            if (!item.parents.empty() && item.parents != std::vector<std::string>{"train"}) {
                throw usage_error(fmt::format("{}: the only section is [train]", where));
            }
            if (item.name == "config") {
                throw usage_error(fmt::format("{}: a file cannot name another", where));
            }
            if (!section) {
                flags.push_back(
                    {{fmt::format("--{}={}", item.name, fmt::join(item.inputs, ","))}, where});
            }
        }
    } catch (const CLI::Error& error) {
        throw usage_error(fmt::format("config {}: {}", path, error.what()));
    }
    return flags;
}

// The words with those of the flags that are not given yet.
std::vector<std::string> with_flags(const CLI::App& app, const std::vector<std::string>& words,
                                    const std::vector<FileFlag>& flags) {
    std::set<std::string> given;
    for (const std::string& word : words) {
        given.insert(meaning(flag_of(word)));
    }
    std::vector<std::string> all = words;
    for (const FileFlag& flag : flags) {
        std::vector<std::string> added = {words.front()};
        added.insert(added.end(), flag.words.begin(), flag.words.end());
        try {
            added = translate_arguments(app, added);
        } catch (const Error& error) {
            throw usage_error(fmt::format("{}: {}", flag.where, error.what()));
        }
        if (added.size() > 1 && !given.contains(meaning(flag_of(added.at(1))))) {
            all.insert(all.end(), added.begin() + 1, added.end());
        }
    }
    return all;
}

}  // namespace

std::vector<std::string> with_recipe(const CLI::App& app, const std::vector<std::string>& words) {
    std::vector<std::string> all = words;
    if (const std::string config = value_of("--config", all); !config.empty()) {
        all = with_flags(app, all, flags_of_config(config));
    }
    if (const std::string recipe = value_of("--recipe", all); !recipe.empty()) {
        all = with_flags(app, all, flags_of_recipe(recipe));
    }
    return all;
}

}  // namespace gyre::train
