// gyre diff: whether two files of weights are the same to the last bit, and if not, where.
#include <fmt/format.h>

#include <array>
#include <filesystem>
#include <string>
#include <vector>

#include "base/printable.hpp"
#include "model/difference.hpp"
#include "train/checkpoint.hpp"
#include "train/cli/commands.hpp"

namespace gyre::train {
namespace {

// Returns a file's metadata and, if it is a checkpoint, each setting and fact of its training.
Values facts_of(const TensorFile& file, const std::filesystem::path& path) {
    Values facts = file.metadata;
    facts.erase(kHashKey);
    if (const auto json = file.metadata.find(kSettingsKey); json != file.metadata.end()) {
        facts.erase(kSettingsKey);
        try {
            const Identity identity = parse_identity(json->second);
            facts.insert(identity.settings.begin(), identity.settings.end());
            for (const auto& [key, value] : identity.facts) {
                facts[kFacts.contains(key) ? kFacts.at(key) : key] = value;
            }
        } catch (const std::exception& problem) {
            throw input_error(
                fmt::format("{}: the settings in its metadata are not those of a checkpoint: {}",
                            path.string(), printable(problem.what())));
        }
    }
    return facts;
}

void print_differences(const Values& first, const Values& second) {
    const auto text = [](const Values& facts, const std::string& name) {
        const auto found = facts.find(name);
        return found == facts.end() ? "nothing" : "'" + printable(found->second) + "'";
    };
    for (const std::string& name : names_of(first, second)) {
        if (text(first, name) != text(second, name)) {
            fmt::print("{}: {} and {}\n", printable(name), text(first, name), text(second, name));
        }
    }
}

}  // namespace

ExitCode run_diff(const DiffOptions& options) {
    const std::array paths = {resolve_checkpoint(options.first),
                              resolve_checkpoint(options.second)};
    std::array files = {read_undamaged(paths[0]), read_undamaged(paths[1])};
    const bool states[] = {has_optimizer_state(files[0]), has_optimizer_state(files[1])};
    if (states[0] != states[1]) {
        fmt::print("Only the {} file has an optimiser's state, which is not compared.\n",
                   states[0] ? "first" : "second");
        drop_optimizer_state(files[states[0] ? 0 : 1]);
    }
    print_differences(facts_of(files[0], paths[0]), facts_of(files[1], paths[1]));
    const std::vector<std::string> lines = tensor_differences(files[0].tensors, files[1].tensors);
    for (const std::string& line : lines) {
        fmt::print("{}\n", printable(line));
    }
    if (lines.empty()) {
        fmt::print("The {} tensors of {} and {} are identical.\n", files[0].tensors.size(),
                   paths[0].string(), paths[1].string());
        return ExitCode::success;
    }
    fmt::print("{} tensor{} of {} and {} differ{}.\n", lines.size(), lines.size() == 1 ? "" : "s",
               paths[0].string(), paths[1].string(), lines.size() == 1 ? "s" : "");
    return ExitCode::differs;
}

}  // namespace gyre::train
