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

std::vector<std::string> with_recipe(const CLI::App& app, const std::vector<std::string>& words) {
    std::set<std::string> given;
    std::string recipe;
    for (std::size_t i = 0; i < words.size(); ++i) {
        const std::string flag = flag_of(words[i]);
        given.insert(meaning(flag));
        if (flag == "--recipe") {
            const bool joined = words[i].size() > flag.size();
            recipe = joined                 ? words[i].substr(flag.size() + 1)
                     : i + 1 < words.size() ? words[i + 1]
                                            : std::string{};
        }
    }
    std::vector<std::string> all = words;
    if (recipe.empty()) {  // or --recipe without a value, which the parser refuses
        return all;
    }
    std::istringstream text(text_of(recipe));
    int number = 0;
    for (std::string line; std::getline(text, line);) {
        ++number;
        std::vector<std::string> added = words_of(line);
        if (added.empty()) {
            continue;
        }
        const std::string where = fmt::format("recipe {}, line {}", recipe, number);
        if (flag_of(added.front()).empty() || flag_of(added.front()) == "--recipe") {
            throw usage_error(fmt::format("{}: '{}' is not a flag of `gyre train` such as --lr 0.1",
                                          where, added.front()));
        }
        added.insert(added.begin(), words.front());
        try {
            added = translate_arguments(app, added);
        } catch (const Error& error) {
            throw usage_error(fmt::format("{}: {}", where, error.what()));
        }
        if (!given.contains(meaning(flag_of(added.at(1))))) {
            all.insert(all.end(), added.begin() + 1, added.end());
        }
    }
    return all;
}

}  // namespace gyre::train
