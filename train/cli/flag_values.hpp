// What flags take: numbers in a range, words in any case, paths. CLI11's own validators name
// neither a remedy nor what was meant.
#pragma once

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <CLI/CLI.hpp>
#include <map>
#include <string>
#include <vector>

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

// A flag whose words stand for values.
template <typename T>
CLI::Option* add_choice(CLI::App& app, const std::string& name, T& value,
                        const std::map<std::string, T>& values, const std::string& description) {
    CLI::Option* option = app.add_option_function<std::string>(
        name, [&value, values](const std::string& word) { value = values.at(word); }, description);
    std::vector<std::string> words;
    for (const auto& [word, meaning] : values) {
        words.push_back(word);
        if (meaning == value) {
            option->default_str(word);
        }
    }
    one_of(option, words);
    return option;
}

// Not empty: as "$FILE" is where FILE is not set.
inline void path(CLI::Option* option, const char* type = "FILE") {
    option->type_name(type)->check(CLI::Validator(
        [](const std::string& text) {
            return text.empty() ? std::string("the path is empty; give one, or leave the flag out")
                                : std::string{};
        },
        ""));
}

}  // namespace gyre::train
