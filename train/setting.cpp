#include "train/setting.hpp"

#include <fmt/ranges.h>

#include <algorithm>
#include <cctype>
#include <charconv>
#include <cstdint>
#include <cstdlib>

#include "train/nearest.hpp"

namespace gyre::train {
namespace {

// Writes the number that the whole text is; returns whether it is one.
template <typename T>
bool parse(const std::string& text, T& number) {
    const char* const end = text.data() + text.size();
    if constexpr (std::is_floating_point_v<T>) {
        // Unlike from_chars(), these round what is too small for the type to 0.
        char* rest = nullptr;
        if constexpr (std::is_same_v<T, float>) {
            number = std::strtof(text.c_str(), &rest);
        } else {
            number = std::strtod(text.c_str(), &rest);
        }
        return rest == end && !text.empty() &&
               std::isspace(static_cast<unsigned char>(text[0])) == 0;
    } else {
        const auto read = std::from_chars(
            text.data() + (std::is_signed_v<T> && text.starts_with('+') ? 1 : 0), end, number);
        return read.ec == std::errc{} && read.ptr == end;
    }
}

std::string lower(std::string text) {
    std::transform(text.begin(), text.end(), text.begin(),
                   [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
    return text;
}

}  // namespace

const Setting* find(const std::vector<Setting>& rows, const std::string& name) {
    const auto found = std::find_if(rows.begin(), rows.end(),
                                    [&](const Setting& row) { return row.name == name; });
    return found == rows.end() ? nullptr : &*found;
}

template <typename T>
std::string read_number(const std::string& text, T& number, const Bounds<T>& bounds) {
    using Limits = std::numeric_limits<T>;
    T value{};
    if (parse(text, value) && value >= bounds.least && value <= bounds.most) {
        number = value;
        return {};
    }
    const char* const kind = std::is_floating_point_v<T> ? "finite number" : "number";
    if (bounds.most < Limits::max()) {
        return fmt::format("'{}' must be a number from {} to {}", text, bounds.least, bounds.most);
    }
    if (std::is_unsigned_v<T>) {
        return fmt::format("'{}' must be a whole number from 0 to {}", text, bounds.most);
    }
    return bounds.least > Limits::lowest()
               ? fmt::format("'{}' must be a {} >= {}", text, kind, bounds.least)
               : fmt::format("'{}' must be a {}", text, kind);
}
template std::string read_number(const std::string&, int&, const Bounds<int>&);
template std::string read_number(const std::string&, std::int64_t&, const Bounds<std::int64_t>&);
template std::string read_number(const std::string&, std::uint64_t&, const Bounds<std::uint64_t>&);
template std::string read_number(const std::string&, float&, const Bounds<float>&);
template std::string read_number(const std::string&, double&, const Bounds<double>&);

Setting custom(std::string name, std::string type, std::string help,
               std::function<std::string(const std::string&)> set,
               std::function<std::string()> value) {
    return {.name = std::move(name),
            .type = std::move(type),
            .help = std::move(help),
            .set = std::move(set),
            .value = std::move(value)};
}

Setting toggle(std::string name, bool& field, std::string help, bool on) {
    return custom(
        std::move(name), "", std::move(help),
        [&field, on](const std::string& given) {
            if (given != "true" && given != "false") {
                return fmt::format("'{}' must be true or false", given);
            }
            field = (given == "true") == on;
            return std::string();
        },
        [&field, on] { return field == on ? "true" : "false"; });
}

Setting text(std::string name, std::string& field, std::string type, std::string help) {
    return custom(
        std::move(name), std::move(type), std::move(help),
        [&field](const std::string& given) {
            field = given;
            return std::string();
        },
        [&field] { return field; });
}

Setting path(std::string name, std::string& field, std::string type, std::string help) {
    Setting row = text(std::move(name), field, std::move(type), std::move(help));
    row.set = [&field](const std::string& given) {
        if (given.empty()) {
            return "the path is empty; give one, or leave the flag out";
        }
        field = given;
        return "";
    };
    return row;
}

Setting paths(std::string name, std::vector<std::string>& field, std::string type,
              std::string help) {
    Setting row = custom(
        std::move(name), std::move(type), std::move(help),
        [&field](const std::string& given) {
            std::string word;
            const std::string problem = path("", word, "", "").set(given);
            if (problem.empty()) {
                field.push_back(word);
            }
            return problem;
        },
        [&field] { return fmt::format("{}", fmt::join(field, ",")); });
    row.max_words = Setting::kManyWords;
    return row;
}

Setting path_ending_in(std::string name, std::string& field,
                       const std::vector<std::string>& endings, std::string help) {
    Setting row = path(std::move(name), field, "", std::move(help));
    std::vector<std::string> types;
    for (const std::string& ending : endings) {
        types.push_back("FILE" + ending);
    }
    row.type = placeholder(types);
    row.set = [set = row.set, endings](const std::string& given) {
        const bool ends = std::any_of(endings.begin(), endings.end(),
                                      [&](const std::string& e) { return given.ends_with(e); });
        return ends ? set(given)
                    : fmt::format("'{}' must end in {}", given, fmt::join(endings, " or "));
    };
    return row;
}

std::string read_word(const std::string& text, const std::vector<std::string>& words,
                      std::size_t& index) {
    const auto found = std::find(words.begin(), words.end(), lower(text));
    if (found == words.end()) {
        return fmt::format("'{}' must be one of {}{}", text, fmt::join(words, ", "),
                           did_you_mean(lower(text), words));
    }
    index = static_cast<std::size_t>(found - words.begin());
    return {};
}

std::string placeholder(const std::vector<std::string>& words) {
    return fmt::format("{}", fmt::join(words, "|"));
}

Setting choice(std::string name, std::string& field, const std::vector<std::string>& words,
               std::string help) {
    return custom(
        std::move(name), placeholder(words), std::move(help),
        [&field, words](const std::string& given) {
            std::size_t index = 0;
            std::string problem = read_word(given, words, index);
            if (problem.empty()) {
                field = words[index];
            }
            return problem;
        },
        [&field] { return field; });
}

}  // namespace gyre::train
