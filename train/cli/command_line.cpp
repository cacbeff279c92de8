#include "train/cli/command_line.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstdlib>

#include "base/error.hpp"
#include "train/cli/tutorial_flags.hpp"
#include "train/nearest.hpp"

namespace gyre::train {
namespace {

// A negative number is a value.
bool is_flag(const std::string& text) {
    return text.size() > 1 && text[0] == '-' && text[1] != '.' && (text[1] < '0' || text[1] > '9');
}

std::vector<const CLI::App*> subcommands(const CLI::App& app) {
    return app.get_subcommands([](const CLI::App*) { return true; });
}

const CLI::App* subcommand(const CLI::App& app, const std::string& name) {
    for (const CLI::App* command : subcommands(app)) {
        if (command->get_name() == name) {
            return command;
        }
    }
    return nullptr;
}

// The subcommand of a whole command line.
const CLI::App* subcommand(const CLI::App& app, const std::vector<std::string>& given) {
    for (const std::string& word : given) {
        if (const CLI::App* found = subcommand(app, word)) {
            return found;
        }
    }
    return nullptr;
}

std::vector<std::string> flag_names(const CLI::App& app) {
    std::vector<std::string> names;
    for (const CLI::Option* option : app.get_options()) {
        for (const std::string& name : option->get_lnames()) {
            names.push_back("--" + name);
        }
    }
    return names;
}

bool has(const CLI::App& app, const std::string& flag) {
    const bool letters = flag.size() > 2 && flag[1] != '-';  // -vh
    return app.get_option_no_throw(letters ? flag.substr(0, 2) : flag) != nullptr;
}

const TutorialFlag* find_tutorial_flag(const std::string& flag) {
    const auto flags = tutorial_flags();
    const auto at = std::find_if(flags.begin(), flags.end(),
                                 [&](const TutorialFlag& known) { return known.name == flag; });
    return at == flags.end() ? nullptr : &*at;
}

[[noreturn]] void refuse_missing_subcommand(const CLI::App& app, const std::string& word,
                                            const std::vector<std::string>& given) {
    std::vector<std::string> names;
    for (const CLI::App* command : subcommands(app)) {
        names.push_back(command->get_name());
    }
    const std::string all = fmt::format("{}", fmt::join(names, ", "));
    std::string message;
    if (is_flag(word)) {
        const CLI::App* typed = subcommand(app, given);
        const std::string command = typed != nullptr ? typed->get_name() : "train";
        message = fmt::format("the subcommand ({}) comes first: gyre {}", all, command);
        for (const std::string& other : given) {
            message += other == command ? "" : " " + other;
        }
    } else {
        message =
            fmt::format("'{}' is not a subcommand ({}){}", word, all, did_you_mean(word, names));
    }
    throw usage_error(fmt::format("{} ({})", message, help_hint(app, given)));
}

// torch.distributed.launch passes each process its place, which is in the environment too: how
// many words are not needed from `at` on.
std::size_t repeats_environment(const std::vector<std::string>& given, std::size_t at) {
    const char* local_rank = std::getenv("LOCAL_RANK");
    for (const std::string flag : {"--local-rank", "--local_rank"}) {
        if (local_rank != nullptr && given[at] == flag + "=" + local_rank) {
            return 1;
        }
        if (local_rank != nullptr && given[at] == flag && at + 1 < given.size() &&
            given[at + 1] == local_rank) {
            return 2;
        }
    }
    return 0;
}

// The flag's name here; if it has none, what to say about it goes to `unknown`.
std::string own_name(const CLI::App& command, const std::string& typed,
                     std::vector<std::string>& unknown) {
    std::string flag = typed;
    std::replace(flag.begin(), flag.end(), '_', '-');
    if (has(command, flag)) {
        return flag;
    }
    const TutorialFlag* tutorial = find_tutorial_flag(flag);
    if (tutorial != nullptr && !tutorial->same.empty() &&
        has(command, std::string(tutorial->same))) {
        return std::string(tutorial->same);
    }
    unknown.push_back(tutorial != nullptr && !tutorial->instead.empty()
                          ? fmt::format("{}: {}", typed, tutorial->instead)
                          : typed + did_you_mean(flag, flag_names(command)));
    return flag;
}

}  // namespace

std::string help_hint(const CLI::App& app, const std::vector<std::string>& given) {
    const CLI::App* command = subcommand(app, given);
    return fmt::format("see `gyre {}--help`", command ? command->get_name() + " " : "");
}

std::vector<std::string> translate_arguments(const CLI::App& app,
                                             const std::vector<std::string>& given) {
    std::vector<std::string> result, unknown;
    const CLI::App* command = nullptr;
    for (std::size_t i = 0; i < given.size(); ++i) {
        const std::string& word = given[i];
        if (const std::size_t needless = repeats_environment(given, i)) {
            i += needless - 1;
        } else if (command == nullptr && subcommand(app, word) != nullptr) {
            command = subcommand(app, word);
            result.push_back(word);
        } else if (command == nullptr && !(is_flag(word) && has(app, word))) {
            refuse_missing_subcommand(app, word, given);
        } else if (command == nullptr || !is_flag(word)) {
            result.push_back(word);
        } else {
            const std::size_t equals = std::min(word.find('='), word.size());
            result.push_back(own_name(*command, word.substr(0, equals), unknown) +
                             word.substr(equals));
        }
    }
    if (!unknown.empty()) {
        throw usage_error(fmt::format("gyre {} has no flag {} ({})", command->get_name(),
                                      fmt::join(unknown, "\n  nor "), help_hint(app, given)));
    }
    return result;
}

}  // namespace gyre::train
