// Messages name an option in backquotes, as in "raise `timeout`": the library knows options, and
// what their user calls them (a flag, a field, a key of a file) only the user's program.
#pragma once

#include <algorithm>
#include <functional>
#include <string>
#include <string_view>

#include "kernels/base/function_ref.hpp"

namespace gyre {

// The text with name(option) in the place of each option and its backquotes. What else stands
// between backquotes, such as a command of several words or `-suffix`, stays as it is; a command of
// one word must stand without them.
inline std::string name_options(std::string_view text,
                                FunctionRef<std::string(std::string_view option)> name) {
    const auto is_option = [](std::string_view word) {
        return !word.empty() && word[0] != '-' && std::all_of(word.begin(), word.end(), [](char c) {
            return (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') || c == '-' || c == '_';
        });
    };
    std::string result;
    std::size_t at = 0;
    for (std::size_t open; (open = text.find('`', at)) != text.npos;) {
        const std::size_t close = text.find('`', open + 1);
        if (close == text.npos) {
            break;
        }
        const std::string_view word = text.substr(open + 1, close - open - 1);
        result += text.substr(at, open - at);
        result += is_option(word) ? name(word) : '`' + std::string(word) + '`';
        at = close + 1;
    }
    return result + std::string(text.substr(at));
}

// What a library that prints a message itself, because the process ends there, makes of its text.
// Empty: nothing.
using Wording = std::function<std::string(std::string_view text)>;
inline std::string worded(const std::string& text, const Wording& wording) {
    return wording ? wording(text) : text;
}

// As programs call them whose flags have the options' names: --timeout.
inline std::string name_flags(std::string_view text) {
    return name_options(text, [](std::string_view option) { return "--" + std::string(option); });
}

}  // namespace gyre
