#include "train/checkpoint.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "kernels/base/error.hpp"
#include "kernels/base/printable.hpp"
#include "train/hash.hpp"

namespace gyre::train {
namespace {

constexpr const char* kOptimizer = "optimizer.";
constexpr const char* kCursor = "gyre.cursor";
constexpr const char* kSettings = "gyre.settings";
constexpr const char* kHash = "gyre.hash";

nlohmann::ordered_json to_json(const Cursor& p) {
    return {{"epoch", p.epoch},   {"step", p.step},       {"loss_sum", p.loss_sum},
            {"images", p.images}, {"correct", p.correct}, {"best_accuracy", p.best_accuracy}};
}

Cursor to_cursor(const nlohmann::json& json) {
    Cursor p;
    json.at("epoch").get_to(p.epoch);
    json.at("step").get_to(p.step);
    json.at("loss_sum").get_to(p.loss_sum);
    json.at("images").get_to(p.images);
    json.at("correct").get_to(p.correct);
    json.at("best_accuracy").get_to(p.best_accuracy);
    if (p.epoch < 1 || p.step < 0 || p.images < 0) {
        throw input_error("a negative count");
    }
    return p;
}

// Without what writing adds.
std::string content_hash(const TensorFile& file) {
    return hash_tensors(file, {kHash, "format"});
}

}  // namespace

std::filesystem::path last_checkpoint(const std::filesystem::path& folder) {
    return folder / "last.safetensors";
}
std::filesystem::path best_checkpoint(const std::filesystem::path& folder) {
    return folder / "best.safetensors";
}

TensorFile checkpoint_file(Checkpoint checkpoint) {
    TensorFile file = std::move(checkpoint.weights);
    for (HostTensor& tensor : checkpoint.optimizer) {
        tensor.name = kOptimizer + tensor.name;
        file.tensors.push_back(std::move(tensor));
    }
    file.metadata[kCursor] = to_json(checkpoint.cursor).dump();
    file.metadata[kSettings] = nlohmann::json(checkpoint.settings).dump();
    file.metadata[kHash] = content_hash(file);
    return file;
}

TensorFile read_undamaged(const std::filesystem::path& path) {
    std::error_code error;
    if (std::filesystem::is_directory(path, error)) {
        throw input_error(fmt::format("{}: a folder; name a file in it, such as {}", path.string(),
                                      best_checkpoint(path).string()));
    }
    TensorFile file = read_safetensors(path);
    const auto hash = file.metadata.find(kHash);
    if (hash != file.metadata.end() && hash->second != content_hash(file)) {
        throw input_error(
            fmt::format("{}: the file is damaged: its content is not what was written (by the hash "
                        "in it); take another checkpoint of this training",
                        path.string()));
    }
    return file;
}

Checkpoint read_checkpoint(const std::filesystem::path& given) {
    std::filesystem::path path = given;
    std::error_code error;
    if (std::filesystem::is_directory(path, error)) {
        path = last_checkpoint(path);
        if (!std::filesystem::exists(path, error)) {
            throw input_error(
                fmt::format("{}: the folder has no {}: no training was saved there; leave `resume` "
                            "out to begin one",
                            given.string(), path.filename().string()));
        }
    }
    Checkpoint checkpoint;
    checkpoint.weights = read_undamaged(path);
    std::vector<HostTensor>& tensors = checkpoint.weights.tensors;
    const auto optimizer = std::stable_partition(
        tensors.begin(), tensors.end(),
        [](const HostTensor& tensor) { return !tensor.name.starts_with(kOptimizer); });
    for (auto tensor = optimizer; tensor != tensors.end(); ++tensor) {
        tensor->name.erase(0, std::string(kOptimizer).size());
        checkpoint.optimizer.push_back(std::move(*tensor));
    }
    tensors.erase(optimizer, tensors.end());
    const auto& metadata = checkpoint.weights.metadata;
    if (metadata.count(kCursor) == 0 || metadata.count(kSettings) == 0) {
        throw input_error(
            fmt::format("{}: the file has weights but not the state of a training of gyre's; begin "
                        "a new training from them with `init`",
                        path.string()));
    }
    try {
        checkpoint.cursor = to_cursor(nlohmann::json::parse(metadata.at(kCursor)));
        checkpoint.settings = nlohmann::json::parse(metadata.at(kSettings)).get<Settings>();
    } catch (const std::exception& problem) {
        throw input_error(fmt::format("{}: its metadata are not those of a checkpoint: {}",
                                      path.string(), printable(problem.what())));
    }
    return checkpoint;
}

TensorFile read_weights(const std::filesystem::path& path) {
    TensorFile file = read_undamaged(path);
    std::erase_if(file.tensors,
                  [](const HostTensor& tensor) { return tensor.name.starts_with(kOptimizer); });
    return file;
}

void require_same_settings(const Settings& saved, const Settings& now, const std::string& path) {
    const auto value = [](const Settings& settings, const std::string& name) {
        const auto found = settings.find(name);
        return found == settings.end() || found->second.empty()
                   ? std::string("not given")
                   : fmt::format("'{}'", printable(found->second));
    };
    Settings names = saved;
    names.insert(now.begin(), now.end());
    std::string differences;
    for (const auto& [name, any] : names) {
        const std::string then = value(saved, name), here = value(now, name);
        if (then != here) {
            differences +=
                fmt::format("{}{}: {} in the saved training, {} now",
                            differences.empty() ? "" : "; ", printable(name), then, here);
        }
    }
    if (!differences.empty()) {
        throw input_error(
            fmt::format("`resume` {}: this would not be the same training: {}. Give what it had, "
                        "or begin a new training from its weights with `init`",
                        path, differences));
    }
}

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
    pending_ = std::async(std::launch::async, [checkpoint = std::move(checkpoint),
                                               names = std::move(names), old]() mutable {
        write_safetensors(names, checkpoint_file(std::move(checkpoint)));
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
