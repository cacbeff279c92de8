#include "train/cli/checkpoint_files.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "kernels/base/error.hpp"
#include "train/session.hpp"

namespace gyre::train {
namespace {

namespace fs = std::filesystem;

// Makes the folder. Throws Error for a path that cannot be one.
void open_folder(const TrainOptions& options) {
    const fs::path folder = options.save;
    std::string extension = folder.extension().string();
    std::transform(extension.begin(), extension.end(), extension.begin(),
                   [](unsigned char c) { return std::tolower(c); });
    std::error_code error;
    const auto status = fs::status(folder, error);
    for (const char* file : {".safetensors", ".pt", ".pth", ".pkl"}) {
        if (extension == file && !fs::is_directory(status)) {
            throw usage_error(fmt::format(
                "--save {}: give the path of a folder: gyre writes last.safetensors and "
                "best.safetensors there, which safetensors.torch.load_file reads",
                options.save));
        }
    }
    if (fs::exists(status) && !fs::is_directory(status)) {
        throw input_error(fmt::format(
            "--save {}: that is no folder, and stays as it is; give the path of a folder",
            options.save));
    }
    fs::create_directories(folder, error);
    if (error || access(folder.c_str(), W_OK | X_OK) != 0) {
        throw input_error(
            fmt::format("--save {}: no file can be written there{}; check the path and its "
                        "permissions",
                        options.save, error ? ": " + error.message() : std::string{}));
    }
    for (const fs::path& file : {last_checkpoint(folder), best_checkpoint(folder)}) {
        if (options.resume.empty() && !options.overwrite && fs::exists(file, error)) {
            throw input_error(
                fmt::format("--save {}: {} is there, of another training; give --resume {} to go "
                            "on with it, --overwrite to lose it, or another folder",
                            options.save, file.filename().string(), options.save));
        }
    }
}

// What gyre eval reads stands beside the weights.
TensorFile weights_file(const Net& net, const WeightFacts& facts) {
    const auto list = [](const std::vector<float>& values) {
        std::string text;
        for (const float value : values) {
            text += fmt::format("{}{}", text.empty() ? "" : ",", value);
        }
        return text;
    };
    const Shape& shape = net.input_shape();
    TensorFile file = {
        net.export_parameters(),
        {{"gyre.version", GYRE_VERSION},
         {"gyre.model", facts.model.source},
         {"gyre.mean", list(facts.normalisation.mean)},
         {"gyre.std", list(facts.normalisation.stddev)},
         {"gyre.data.mean", list(facts.measured.mean)},
         {"gyre.data.std", list(facts.measured.stddev)},
         {"gyre.shape", fmt::format("{}x{}x{}", shape.channels, shape.height, shape.width)},
         {"gyre.classes", fmt::format("{}", facts.classes)}}};
    if (!facts.class_names.empty()) {
        file.metadata["gyre.class_names"] = nlohmann::json(facts.class_names).dump();
    }
    return file;
}

// The optimiser takes the state that rank 0 has read.
void share_state(Session& session, const std::vector<HostTensor>& read, const std::string& source) {
    Communicator& comm = session.communicator();
    std::vector<HostTensor> state = session.optimizer().export_state();
    agree(comm, [&] {
        for (HostTensor& tensor : state) {
            const auto found = std::find_if(read.begin(), read.end(), [&](const HostTensor& t) {
                return t.name == tensor.name && t.shape == tensor.shape;
            });
            if (comm.is_root() && found == read.end()) {
                throw input_error(
                    fmt::format("--resume {}: the optimiser's state lacks {} in its shape; take "
                                "another checkpoint of this training",
                                source, tensor.name));
            }
            tensor.values = comm.is_root() ? found->values : tensor.values;
        }
    });
    for (HostTensor& tensor : state) {
        comm.broadcast(tensor.values.data(), tensor.values.size() * sizeof(float), 0);
    }
    session.optimizer().import_state(state, source);
}

}  // namespace

CheckpointFiles::CheckpointFiles(const TrainOptions& options, bool is_root)
    : options_(options), is_root_(is_root) {
    if (options.save.empty() && (options.keep > 0 || options.save_every.given)) {
        throw usage_error("--keep and --save-every say how --save does it: give that, too");
    }
    if (!options.csv.empty() && std::filesystem::path(options.csv) == fs::path(options.json)) {
        throw usage_error("--json and --metrics write files: give each its own");
    }
    if (is_root && !options.save.empty()) {
        open_folder(options);
        writer_ = std::make_unique<CheckpointWriter>(options.save, options.keep);
    }
}

void CheckpointFiles::meet(Communicator& comm) {
    const std::pair<const char*, const std::string*> files[] = {
        {"--save", &options_.save},   {"--resume", &options_.resume},
        {"--init", &options_.init},   {"--json", &options_.json},
        {"--metrics", &options_.csv}, {"--tensorboard", &options_.tensorboard},
        {"--trace", &options_.trace}};
    std::array<double, 2 * std::size(files)> given{};  // on rank 0, on any
    for (std::size_t i = 0; i < std::size(files); ++i) {
        const double own = files[i].second->empty() ? 0.0 : 1.0;
        given[i] = is_root_ ? own : 0.0;
        given[std::size(files) + i] = own;
    }
    comm.allreduce_sum(given);
    for (std::size_t i = 0; i < std::size(files) && is_root_; ++i) {
        if (given[i] == 0.0 && given[std::size(files) + i] > 0.0) {
            fmt::print(stderr, "gyre: {} counts on rank 0 only, which does not have it: ignored\n",
                       files[i].first);
        }
    }
    saves_ = given[0] > 0.0;
    resumes_ = given[1] > 0.0;
    traces_ = given[std::size(files) - 1] > 0.0;
}

bool CheckpointFiles::due_after_steps(std::int64_t steps) const {
    const SaveEvery& every = options_.save_every;
    return saves_ && every.steps && steps % every.count == 0;
}

bool CheckpointFiles::due_after_epochs(int epochs) const {
    const SaveEvery& every = options_.save_every;
    return saves_ && (every.steps || epochs % every.count == 0 || epochs == options_.epochs);
}

Cursor CheckpointFiles::resume(Session& session, const Settings& settings) {
    Communicator& comm = session.communicator();
    Checkpoint checkpoint;
    agree(comm, [&] {
        if (!is_root_) {
            return;
        }
        checkpoint = read_checkpoint(options_.resume);
        require_same_settings(checkpoint.settings, settings, options_.resume);
        session.net().import_parameters(checkpoint.weights.tensors, options_.resume);
    });
    share_state(session, checkpoint.optimizer, options_.resume);
    comm.broadcast(&checkpoint.cursor, sizeof checkpoint.cursor, 0);
    return checkpoint.cursor;
}

void CheckpointFiles::save(Session& session, const WeightFacts& facts, const Settings& settings,
                           const Cursor& cursor, std::int64_t step, bool last, bool best) {
    if (!saves_ || !(last || best)) {
        return;
    }
    std::vector<HostTensor> optimizer;
    if (is_root_ || session.optimizer().shared_out()) {
        optimizer = session.optimizer().export_state();
    }
    agree(session.communicator(), [&] {
        if (is_root_) {
            writer_->write({.weights = weights_file(session.net(), facts),
                            .optimizer = std::move(optimizer),
                            .cursor = cursor,
                            .settings = settings},
                           step, last, best);
        }
    });
}

void CheckpointFiles::finish(Communicator& comm) {
    if (saves_) {
        agree(comm, [&] {
            if (is_root_) {
                writer_->finish();
            }
        });
    }
}

}  // namespace gyre::train
