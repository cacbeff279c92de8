#include "train/checkpoint.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <nlohmann/json.hpp>

#include "base/error.hpp"
#include "base/json_integer.hpp"
#include "base/printable.hpp"
#include "train/hash.hpp"
#include "train/settings.hpp"

namespace gyre::train {
namespace {

constexpr const char* kOptimizer = "optimizer.";
constexpr const char* kCursor = "gyre.cursor";
// The two ends of a numbered checkpoint's name.
constexpr std::string_view kStepPrefix = "step-", kStepSuffix = ".safetensors";

constexpr int kSchema = 2;  // of kSettingsKey

bool is_state(const HostTensor& tensor) {
    return tensor.name.starts_with(kOptimizer);
}

nlohmann::ordered_json to_json(const Cursor& p) {
    return {{"epoch", p.epoch},          {"step", p.step},       {"loss_sum", p.loss_sum},
            {"images", p.images},        {"correct", p.correct}, {"best_accuracy", p.best_accuracy},
            {"best_epoch", p.best_epoch}};
}

Cursor to_cursor(const nlohmann::json& json) {
    Cursor p;
    p.epoch = json_integer<int>(json.at("epoch"));
    p.step = json_integer<std::int64_t>(json.at("step"));
    json.at("loss_sum").get_to(p.loss_sum);
    p.images = json_integer<std::int64_t>(json.at("images"));
    p.correct = json_integer<std::int64_t>(json.at("correct"));
    json.at("best_accuracy").get_to(p.best_accuracy);
    // Before 0.10 it was not written: the last finished epoch is the latest that can be the best.
    p.best_epoch = json.contains("best_epoch") ? json_integer<int>(json.at("best_epoch"))
                   : p.best_accuracy >= 0.0    ? p.epoch - 1
                                               : 0;
    if (p.epoch < 1 || p.step < 0 || p.images < 0) {
        throw input_error("a negative count");
    }
    if (p.best_epoch < 0 || p.best_epoch >= p.epoch) {
        throw input_error("a best epoch that is not finished");
    }
    return p;
}

nlohmann::ordered_json to_json(const Identity& identity) {
    return {{"schema", kSchema}, {"flags", identity.settings}, {"facts", identity.facts}};
}

// Settings of schema 1: the texts of flags as they were given, and facts by their descriptions.
Identity to_identity_of_texts(const Values& texts) {
    Identity identity;
    RunSpec run;
    const std::vector<Setting> rows = settings(run);
    for (const auto& [key, text] : texts) {
        const Setting* const row = key.starts_with("--") ? find(rows, key.substr(2)) : nullptr;
        const auto fact = std::find_if(kFacts.begin(), kFacts.end(),
                                       [&](const auto& known) { return known.second == key; });
        if (row != nullptr) {
            // A text that is refused today differs from every value.
            identity.settings[row->name] = row->set(text).empty() ? row->value() : text;
        } else if (key.starts_with("--")) {
            identity.settings[key.substr(2)] = text;
        } else {
            identity.facts[fact == kFacts.end() ? key : fact->first] = text;
        }
    }
    return identity;
}

// Without what writing adds.
std::string content_hash(const TensorFile& file) {
    return hash_tensors(file, {kHashKey, "format"});
}

// Writes the file. A folder that was removed during the training is made again: the weights would
// be lost otherwise.
void write_in_folder(const std::filesystem::path& folder,
                     const std::vector<std::filesystem::path>& names, const TensorFile& file) {
    try {
        write_safetensors(names, file);
    } catch (const Error&) {
        std::error_code error;
        if (!std::filesystem::create_directories(folder, error)) {
            throw;
        }
        fmt::print(stderr,
                   "gyre: {}: the folder was removed during the training; it is made again, for "
                   "the checkpoints from now on\n",
                   folder.string());
        write_safetensors(names, file);
    }
}

}  // namespace

Identity parse_identity(const std::string& text) {
    const auto json = nlohmann::json::parse(text);
    if (json.contains("schema") && json.at("schema") != kSchema) {
        throw input_error(fmt::format("schema {}, which this version of gyre does not know",
                                      json.at("schema").dump()));
    }
    Identity identity = json.contains("schema") ? Identity{json.at("flags").get<Values>(),
                                                           json.at("facts").get<Values>()}
                                                : to_identity_of_texts(json.get<Values>());
    // Earlier versions have this setting under its other name.
    if (auto earlier = identity.settings.extract("shards"); !earlier.empty()) {
        earlier.key() = "virtual-ranks";
        identity.settings.insert(std::move(earlier));
    }
    return identity;
}

int virtual_ranks(const Identity& identity) {
    const auto found = identity.settings.find("virtual-ranks");
    const std::string value = found == identity.settings.end() ? std::string() : found->second;
    int count = 0;
    std::from_chars(value.data(), value.data() + value.size(), count);
    return std::clamp(count, 0, kMostShards);
}

std::filesystem::path last_checkpoint(const std::filesystem::path& folder) {
    return folder / "last.safetensors";
}
std::filesystem::path best_checkpoint(const std::filesystem::path& folder) {
    return folder / "best.safetensors";
}

std::set<std::string> names_of(const Values& a, const Values& b) {
    std::set<std::string> names;
    for (const Values* const values : {&a, &b}) {
        for (const auto& [name, value] : *values) {
            names.insert(name);
        }
    }
    return names;
}

std::string identity_text(const Identity& identity) {
    return to_json(identity).dump();
}

std::string state_name(const std::string& name) {
    return kOptimizer + name;
}

TensorFile checkpoint_file(Checkpoint checkpoint) {
    TensorFile file = std::move(checkpoint.weights);
    for (HostTensor& tensor : checkpoint.optimizer) {
        tensor.name = state_name(tensor.name);
        file.tensors.push_back(std::move(tensor));
    }
    file.metadata[kCursor] = to_json(checkpoint.cursor).dump();
    file.metadata[kSettingsKey] = identity_text(checkpoint.identity);
    file.metadata[kHashKey] = content_hash(file);
    return file;
}

TensorFile read_undamaged(const std::filesystem::path& path) {
    std::error_code error;
    if (std::filesystem::is_directory(path, error)) {
        throw input_error(fmt::format("{}: a folder; name a file in it, such as {}", path.string(),
                                      best_checkpoint(path).string()));
    }
    TensorFile file = read_safetensors(path);
    const auto hash = file.metadata.find(kHashKey);
    if (hash != file.metadata.end() && hash->second != content_hash(file)) {
        throw input_error(
            fmt::format("{}: the file is damaged: its content is not what was written (by the hash "
                        "in it); take another checkpoint of this training",
                        path.string()));
    }
    return file;
}

std::filesystem::path resolve_checkpoint(const std::filesystem::path& path) {
    std::error_code error;
    return std::filesystem::is_directory(path, error) ? last_checkpoint(path) : path;
}

Checkpoint read_checkpoint(const std::filesystem::path& given) {
    const std::filesystem::path path = resolve_checkpoint(given);
    std::error_code error;
    if (path != given && !std::filesystem::exists(path, error)) {
        throw input_error(
            fmt::format("{}: the folder has no {}: no training was saved there; leave `resume` out "
                        "to begin one",
                        given.string(), path.filename().string()));
    }
    Checkpoint checkpoint;
    checkpoint.weights = read_undamaged(path);
    std::vector<HostTensor>& tensors = checkpoint.weights.tensors;
    const auto optimizer = std::stable_partition(tensors.begin(), tensors.end(),
                                                 [](const HostTensor& t) { return !is_state(t); });
    for (auto tensor = optimizer; tensor != tensors.end(); ++tensor) {
        tensor->name.erase(0, std::string(kOptimizer).size());
        checkpoint.optimizer.push_back(std::move(*tensor));
    }
    tensors.erase(optimizer, tensors.end());
    const auto& metadata = checkpoint.weights.metadata;
    if (metadata.count(kCursor) == 0 || metadata.count(kSettingsKey) == 0) {
        throw input_error(
            fmt::format("{}: the file has weights but not the state of a training of gyre's; begin "
                        "a new training from them with `init`",
                        path.string()));
    }
    if (metadata.count(kHashKey) == 0) {
        throw input_error(
            fmt::format("{}: the file is damaged: the hash of its content is missing; take another "
                        "checkpoint of this training, or begin a new one from its weights with "
                        "`init`",
                        path.string()));
    }
    try {
        checkpoint.cursor = to_cursor(nlohmann::json::parse(metadata.at(kCursor)));
        checkpoint.identity = parse_identity(metadata.at(kSettingsKey));
    } catch (const std::exception& problem) {
        throw input_error(fmt::format("{}: its metadata are not those of a checkpoint: {}",
                                      path.string(), printable(problem.what())));
    }
    return checkpoint;
}

TensorFile read_weights(const std::filesystem::path& path) {
    TensorFile file = read_undamaged(path);
    drop_optimizer_state(file);
    return file;
}

void drop_optimizer_state(TensorFile& file) {
    std::erase_if(file.tensors, is_state);
}

bool has_optimizer_state(const TensorFile& file) {
    return std::any_of(file.tensors.begin(), file.tensors.end(), is_state);
}

void require_same(const Identity& saved, const Identity& now, const std::string& place,
                  const std::string& otherwise) {
    std::string differences;
    const auto compare = [&](const std::string& what, const std::string& then,
                             const std::string& here) {
        const auto text = [](const std::string& value) {
            return value.empty() ? "not given" : fmt::format("'{}'", printable(value));
        };
        if (then != here) {
            differences += fmt::format("{}{}: {} in the saved training, {} now",
                                       differences.empty() ? "" : "; ", printable(what), text(then),
                                       text(here));
        }
    };
    const auto value_in = [](const Values& values, const std::string& name) {
        const auto found = values.find(name);
        return found == values.end() ? std::string() : found->second;
    };
    RunSpec defaults;
    defaults.batch.automatic_shards = false;  // earlier versions had none unless asked
    const std::vector<Setting> rows = settings(defaults);
    for (const std::string& name : names_of(saved.settings, now.settings)) {
        const Setting* const row = find(rows, name);
        if (row != nullptr && !row->must_match_on_resume()) {
            continue;  // an earlier version saved more
        }
        // A file of an earlier version lacks later settings, which then had their defaults.
        const auto value = [&](const Values& values) {
            return row == nullptr || values.contains(name) ? value_in(values, name) : row->value();
        };
        compare(fmt::format("`{}`", name), value(saved.settings), value(now.settings));
    }
    const bool two_ranks = value_in(saved.facts, "ranks") == "2";
    for (const std::string& key : names_of(saved.facts, now.facts)) {
        std::string name = kFacts.contains(key) ? kFacts.at(key) : key;
        if (key == "communicator") {
            if (two_ranks) {
                continue;  // a sum of two terms has one order, whichever library adds them
            }
            name += " (`comm`)";
        }
        compare(name, value_in(saved.facts, key), value_in(now.facts, key));
    }
    if (!differences.empty()) {
        throw input_error(
            fmt::format("{}: this would not be the same training: {}. Give what it had, {}", place,
                        differences, otherwise));
    }
}

std::int64_t step_of(const std::filesystem::path& numbered) {
    return std::strtoll(numbered.filename().string().substr(kStepPrefix.size()).c_str(), nullptr,
                        10);
}

std::vector<std::filesystem::path> numbered_checkpoints(const std::filesystem::path& folder) {
    std::vector<std::filesystem::path> found;
    std::error_code error;
    for (std::filesystem::directory_iterator at(folder, error), end; !error && at != end;
         at.increment(error)) {
        const std::string name = at->path().filename().string();
        if (name.size() > kStepPrefix.size() + kStepSuffix.size() &&
            name.starts_with(kStepPrefix) &&
            name.find_first_not_of("0123456789", kStepPrefix.size()) ==
                name.size() - kStepSuffix.size() &&
            name.ends_with(kStepSuffix)) {
            found.push_back(at->path());
        }
    }
    std::sort(found.begin(), found.end(), [](const auto& a, const auto& b) {
        const std::string first = a.filename().string(), second = b.filename().string();
        return std::pair(first.size(), first) < std::pair(second.size(), second);
    });
    return found;
}

CheckpointWriter::CheckpointWriter(std::filesystem::path folder, int keep)
    : folder_(std::move(folder)), keep_(keep), kept_(numbered_checkpoints(folder_)) {}

CheckpointWriter::~CheckpointWriter() {
    if (pending_.valid()) {
        pending_.wait();
    }
}

void CheckpointWriter::write(Checkpoint&& checkpoint, std::int64_t step, bool last, bool best) {
    finish();
    std::vector<std::filesystem::path> names, old;
    if (last && keep_ > 0) {
        names.push_back(folder_ / fmt::format("step-{:09}.safetensors", step));
        std::erase(kept_, names.back());
        kept_.push_back(names.back());
        while (kept_.size() > static_cast<std::size_t>(keep_)) {
            old.push_back(kept_.front());
            kept_.erase(kept_.begin());
        }
    }
    // The last name is where a resumed training looks: the others are there before it is.
    if (best) {
        names.push_back(best_checkpoint(folder_));
    }
    if (last) {
        names.push_back(last_checkpoint(folder_));
    }
    pending_ =
        std::async(std::launch::async, [checkpoint = std::move(checkpoint),
                                        names = std::move(names), old, folder = folder_]() mutable {
            write_in_folder(folder, names, checkpoint_file(std::move(checkpoint)));
            for (const std::filesystem::path& file : old) {
                std::error_code ignored;
                std::filesystem::remove(file, ignored);
            }
        });
}

void CheckpointWriter::finish() {
    if (pending_.valid()) {
        pending_.get();
    }
}

}  // namespace gyre::train
