// Messages name options in backquotes, as in "raise `timeout`". The library knows its options, but
// only the program knows what its user calls them: a flag, a field or a key of a file.
#pragma once

#include <algorithm>
#include <functional>
#include <string>
#include <string_view>

#include "base/function_ref.hpp"

namespace gyre {

// Replaces each backquoted option and its backquotes by name(option). Other backquoted text, such
// as `-suffix` or a command of several words, is kept as it is; a one-word command must therefore
// be written without backquotes.
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

// Rewords text that the library prints itself because the process is about to end. Empty: the text
// is printed unchanged.
using Wording = std::function<std::string(std::string_view text)>;
inline std::string worded(const std::string& text, const Wording& wording) {
    return wording ? wording(text) : text;
}

// For programs whose flags are named like the options: `timeout` becomes --timeout.
inline std::string name_flags(std::string_view text) {
    return name_options(text, [](std::string_view option) { return "--" + std::string(option); });
}

}  // namespace gyre
