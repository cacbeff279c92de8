// What flags take: numbers in a range, words in any case, paths. CLI11's own validators name
// neither a remedy nor what was meant.
#pragma once

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <string>
#include <utility>
#include <vector>

#include "kernels/ops/shapes.hpp"
#include "train/cli/nearest.hpp"

namespace gyre::train {

template <typename T>
CLI::Validator at_least(T least) {
    return {[least](const std::string& text) {
                T value{};
                return CLI::detail::lexical_cast(text, value) && value >= least
                           ? std::string{}
                           : fmt::format("'{}' must be a number >= {}", text, least);
            },
            ""};
}

template <typename T>
CLI::Validator between(T least, T most) {
    return {[least, most](const std::string& text) {
                T value{};
                return CLI::detail::lexical_cast(text, value) && value >= least && value <= most
                           ? std::string{}
                           : fmt::format("'{}' must be a number from {} to {}", text, least, most);
            },
            ""};
}

// One of the words, in any case, in whose place its own spelling is taken.
inline void one_of(CLI::Option* option, const std::vector<std::string>& words) {
    option->type_name(fmt::format("{}", fmt::join(words, "|")));
    option->transform(CLI::Validator(
        [words](std::string& text) {
            for (const std::string& word : words) {
                if (CLI::detail::to_lower(text) == word) {
                    text = word;
                    return std::string{};
                }
            }
            return fmt::format("'{}' must be one of {}{}", text, fmt::join(words, ", "),
                               did_you_mean(CLI::detail::to_lower(text), words));
        },
        ""));
}

// Words that stand for values, each for one.
template <typename T>
using Words = std::vector<std::pair<std::string, T>>;

template <typename T>
const std::string& word_for(const T& value, const Words<T>& words) {
    return std::find_if(words.begin(), words.end(),
                        [&](const auto& word) { return word.second == value; })
        ->first;
}

// A flag that takes such words.
template <typename T>
CLI::Option* add_choice(CLI::App& app, const std::string& name, T& value, const Words<T>& words,
                        const std::string& description) {
    const auto take = [&value, words](const std::string& given) {
        value = std::find_if(words.begin(), words.end(), [&](const auto& word) {
                    return word.first == given;
                })->second;
    };
    CLI::Option* option = app.add_option_function<std::string>(name, take, description);
    option->default_str(word_for(value, words));
    std::vector<std::string> all;
    for (const auto& [word, meaning] : words) {
        all.push_back(word);
    }
    one_of(option, all);
    return option;
}

// Of images, as 3x32x32.
inline void add_image(CLI::App& app, Shape& image) {
    app.add_option_function<std::string>(
           "--image",
           [&image](const std::string& text) {
               char end = 0;
               if (std::sscanf(text.c_str(), "%dx%dx%d%c", &image.channels, &image.height,
                               &image.width, &end) != 3 ||
                   std::min({image.channels, image.height, image.width}) < 1 ||
                   std::max({image.channels, image.height, image.width}) > 1 << 14) {
                   throw CLI::ValidationError(
                       "--image",
                       fmt::format("'{}' must be channels, rows and columns such as 3x32x32",
                                   text));
               }
           },
           "Channels, rows and columns of the images")
        ->default_str("1x28x28");
}

// Not empty: as "$FILE" is where FILE is not set.
inline CLI::Option* path(CLI::Option* option, const char* type = "FILE") {
    return option->type_name(type)->check(CLI::Validator(
        [](const std::string& text) {
            return text.empty() ? std::string("the path is empty; give one, or leave the flag out")
                                : std::string{};
        },
        ""));
}

}  // namespace gyre::train
