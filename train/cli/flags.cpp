#include "train/cli/flags.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "train/cli/setup.hpp"

namespace gyre::train {
namespace {

CLI::Option* add_flag(CLI::App& app, const Setting& row) {
    const std::string flag = (row.positional ? "" : "--") + row.name;
    const auto take = [row, flag](const std::string& text) {
        if (const std::string problem = row.set(text); !problem.empty()) {
            throw CLI::ValidationError(flag, with_flag_names(problem));
        }
    };
    const std::string help = with_flag_names(row.help);
    const std::string names = row.letter.empty() ? flag : "-" + row.letter + "," + flag;
    if (row.type.empty()) {
        return app.add_flag_function(
            names, [take](std::int64_t count) { take(count > 0 ? "true" : "false"); }, help);
    }
    const auto take_all = [take, row](const CLI::results_t& words) {
        if (row.positional) {
            std::for_each(words.begin(), words.end(), take);
        } else {
            take(fmt::format("{}", fmt::join(words, ",")));
        }
        return true;
    };
    CLI::Option* const option = app.add_option(names, take_all, help);
    option->type_name(row.type)->required(row.required);
    if (row.max_words > 1) {
        option->expected(1, row.max_words)->allow_extra_args();
    } else if (!row.positional) {
        option->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
    }
    if (const std::string value = row.value(); !value.empty() && !row.help.ends_with(']')) {
        option->default_str(value);
    }
    return option;
}

}  // namespace

void add_flags(CLI::App& app, const std::vector<Setting>& rows) {
    for (const Setting& row : rows) {
        CLI::Option* const option = add_flag(app, row);
        if (!row.heading.empty()) {
            option->group(row.heading);
        }
    }
    for (const Setting& row : rows) {
        for (const std::string& other : row.excludes) {
            app.get_option("--" + row.name)->excludes(app.get_option("--" + other));
        }
    }
    CLI::Option* const help = app.set_help_flag("-h,--help", "Print this help");
    if (!rows.empty() && !rows.front().heading.empty()) {
        help->group("Diagnosis");
    }
}

std::vector<ManifestEntry> manifest_of(const std::vector<Setting>& rows) {
    std::vector<ManifestEntry> entries;
    for (const Setting& row : rows) {
        if (row.compared()) {
            entries.push_back({"flag --" + row.name, row.value()});
        }
    }
    return entries;
}

}  // namespace gyre::train
