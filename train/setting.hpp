// One row of the table of settings: everything that flags, files, checkpoints, the comparison of
// the ranks, --help and the manual know about a setting, and the field that it is bound to.
#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <limits>
#include <map>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace gyre::train {

// Whose value counts: all ranks must have the same one; each rank has its own; or that of rank 0.
enum class Scope { all_ranks, each_rank, rank_0 };
// How a resumed training's value relates to the one that was saved.
enum class OnResume { must_match, may_change };

struct Setting {
    std::string name;  // of the flag, without its dashes; a file spells it the same way
    std::string type;  // the placeholder in --help: INT, FILE, on|off; empty: a switch
    std::string help;  // ends with the default in brackets if value() does not show it
    // Reads a text into the field. Returns what is wrong with it, and nothing if it was read.
    std::function<std::string(const std::string& text)> set;
    // The field's value as text, always the same for the same value; set() reads it back. Empty if
    // the setting has no value.
    std::function<std::string()> value;
    Scope scope = Scope::all_ranks;
    OnResume on_resume = OnResume::must_match;
    std::string heading = {};                // in --help
    std::string letter = {};                 // the short flag
    std::vector<std::string> excludes = {};  // settings that cannot be given with this one
    std::string short_for = {};  // the setting that this switch sets; it has no value of its own
    bool required = false;
    bool positional = false;  // given without a flag
    int max_words = 1;        // words on a command line, which are joined by commas
    static constexpr int kManyWords = 1 << 20;

    bool compared() const { return scope == Scope::all_ranks && short_for.empty(); }
    bool must_match_on_resume() const { return compared() && on_resume == OnResume::must_match; }

    // Copies that differ in one respect, to be chained where a table is written.
    Setting may_change() const { return with(&Setting::on_resume, OnResume::may_change); }
    Setting of_each_rank() const { return with(&Setting::scope, Scope::each_rank); }
    Setting of_rank_0() const { return with(&Setting::scope, Scope::rank_0); }
    Setting abbreviated(std::string flag) const { return with(&Setting::letter, std::move(flag)); }
    Setting instead_of(const std::string& other) const {
        Setting copy = *this;
        copy.excludes.push_back(other);
        return copy;
    }
    Setting standing_for(std::string other) const {
        return with(&Setting::short_for, std::move(other));
    }
    Setting is_required() const { return with(&Setting::required, true); }
    Setting without_flag() const { return with(&Setting::positional, true); }
    Setting shown_as(std::string placeholder) const {
        return with(&Setting::type, std::move(placeholder));
    }

 private:
    template <typename T>
    Setting with(T Setting::*member, T given) const {
        Setting copy = *this;
        copy.*member = std::move(given);
        return copy;
    }
};

// The row of this name; null if there is none.
const Setting* find(const std::vector<Setting>& rows, const std::string& name);

// Values of settings by their names, as Setting::value() writes them; without those that have none.
using Values = std::map<std::string, std::string>;

template <typename T>
struct Bounds {
    T least = std::numeric_limits<T>::lowest(), most = std::numeric_limits<T>::max();
};

// Reads a whole text as one finite number. Returns what is wrong with it, or nothing.
template <typename T>
std::string read_number(const std::string& text, T& number, const Bounds<T>& bounds);
extern template std::string read_number(const std::string&, int&, const Bounds<int>&);
extern template std::string read_number(const std::string&, std::int64_t&,
                                        const Bounds<std::int64_t>&);
extern template std::string read_number(const std::string&, std::uint64_t&,
                                        const Bounds<std::uint64_t>&);
extern template std::string read_number(const std::string&, float&, const Bounds<float>&);
extern template std::string read_number(const std::string&, double&, const Bounds<double>&);

// The kinds of settings.

// A setting with a reader and a writer of its own.
Setting custom(std::string name, std::string type, std::string help,
               std::function<std::string(const std::string&)> set,
               std::function<std::string()> value);
// A switch, which makes the field `on`.
Setting toggle(std::string name, bool& field, std::string help, bool on = true);
Setting text(std::string name, std::string& field, std::string type, std::string help);
// A text that is not empty, as "$FILE" is if FILE is not set.
Setting path(std::string name, std::string& field, std::string type, std::string help);
Setting paths(std::string name, std::vector<std::string>& field, std::string type,
              std::string help);
// A path that ends in one of these, such as .csv.
Setting path_ending_in(std::string name, std::string& field,
                       const std::vector<std::string>& endings, std::string help);

// Reads one of the words, in any case: writes its index. Returns what is wrong, or nothing.
std::string read_word(const std::string& text, const std::vector<std::string>& words,
                      std::size_t& index);
std::string placeholder(const std::vector<std::string>& words);
Setting choice(std::string name, std::string& field, const std::vector<std::string>& words,
               std::string help);

template <typename T>
const char* number_type() {
    return std::is_floating_point_v<T> ? "FLOAT" : std::is_signed_v<T> ? "INT" : "UINT";
}

template <typename T>
Setting number(std::string name, T& field, const Bounds<std::type_identity_t<T>>& bounds,
               std::string help) {
    return custom(
        std::move(name), number_type<T>(), std::move(help),
        [&field, bounds](const std::string& given) { return read_number(given, field, bounds); },
        [&field] { return fmt::format("{}", field); });
}

template <typename T>
Setting number(std::string name, std::optional<T>& field,
               const Bounds<std::type_identity_t<T>>& bounds, std::string help) {
    return custom(
        std::move(name), number_type<T>(), std::move(help),
        [&field, bounds](const std::string& given) {
            T value{};
            std::string problem = read_number(given, value, bounds);
            if (problem.empty()) {
                field = value;
            }
            return problem;
        },
        [&field] { return field ? fmt::format("{}", *field) : std::string(); });
}

// Numbers separated by commas.
template <typename T>
std::string read_numbers(const std::string& text, std::vector<T>& numbers,
                         const Bounds<std::type_identity_t<T>>& bounds = {}) {
    std::vector<T> all;
    for (std::size_t begin = 0; begin <= text.size();) {
        const std::size_t end = std::min(text.find(',', begin), text.size());
        if (std::string problem =
                read_number(text.substr(begin, end - begin), all.emplace_back(), bounds);
            !problem.empty()) {
            return problem;
        }
        begin = end + 1;
    }
    numbers = std::move(all);
    return {};
}

template <typename T>
Setting numbers(std::string name, std::vector<T>& field,
                const Bounds<std::type_identity_t<T>>& bounds, std::string help) {
    Setting row = custom(
        std::move(name), number_type<T>(), std::move(help),
        [&field, bounds](const std::string& given) { return read_numbers(given, field, bounds); },
        [&field] {
            std::string joined;
            for (const T& each : field) {
                joined += fmt::format("{}{}", joined.empty() ? "" : ",", each);
            }
            return joined;
        });
    row.max_words = Setting::kManyWords;
    return row;
}

// Words that stand for values.
template <typename T>
using Words = std::vector<std::pair<std::string, T>>;

template <typename T>
const std::string& word_for(const T& value, const Words<T>& words) {
    std::size_t at = 0;
    while (words[at].second != value) {
        ++at;
    }
    return words[at].first;
}

template <typename T>
Setting choice(std::string name, T& field, const Words<std::type_identity_t<T>>& words,
               std::string help) {
    std::vector<std::string> all;
    for (const auto& [word, meaning] : words) {
        all.push_back(word);
    }
    return custom(
        std::move(name), placeholder(all), std::move(help),
        [&field, words, all](const std::string& given) {
            std::size_t index = 0;
            std::string problem = read_word(given, all, index);
            if (problem.empty()) {
                field = words[index].second;
            }
            return problem;
        },
        [&field, words] { return word_for(field, words); });
}

}  // namespace gyre::train
