#include "train/checkpoint_files.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "base/error.hpp"

namespace gyre::train {
namespace {

namespace fs = std::filesystem;

// True if `resume` is this folder, or a file in it.
bool resumes_from(const fs::path& resume, const fs::path& folder) {
    std::error_code error;
    const fs::path given = fs::absolute(resume, error);
    return !resume.empty() &&
           fs::equivalent(fs::is_directory(given, error) ? given : given.parent_path(), folder,
                          error);
}

// Makes the folder. Throws Error for a path that cannot be one.
void open_folder(const CheckpointSpec& options) {
    const fs::path folder = options.save;
    std::string extension = folder.extension().string();
    std::transform(extension.begin(), extension.end(), extension.begin(),
                   [](unsigned char c) { return std::tolower(c); });
    std::error_code error;
    const auto status = fs::status(folder, error);
    for (const char* file : {".safetensors", ".pt", ".pth", ".pkl"}) {
        if (extension == file && !fs::is_directory(status)) {
            throw usage_error(fmt::format(
                "`save` {}: give the path of a folder: gyre writes last.safetensors and "
                "best.safetensors there, which safetensors.torch.load_file reads",
                options.save));
        }
    }
    if (fs::exists(status) && !fs::is_directory(status)) {
        throw input_error(fmt::format(
            "`save` {}: that is not a folder, and stays as it is; give the path of a folder",
            options.save));
    }
    fs::create_directories(folder, error);
    if (error || access(folder.c_str(), W_OK | X_OK) != 0) {
        throw input_error(
            fmt::format("`save` {}: no file can be written there{}; check the path and its "
                        "permissions",
                        options.save, error ? ": " + error.message() : std::string{}));
    }
    if (options.overwrite || resumes_from(options.resume, folder)) {
        return;
    }
    std::vector<fs::path> files = numbered_checkpoints(folder);
    files.insert(files.begin(), {last_checkpoint(folder), best_checkpoint(folder)});
    for (const fs::path& file : files) {
        if (fs::exists(file, error)) {
            throw input_error(
                fmt::format("`save` {}: {} is there, of another training; give `resume` {} to "
                            "continue it, `overwrite` to lose it, or another folder",
                            options.save, file.filename().string(), options.save));
        }
    }
}

// The metadata are what gyre eval reads.
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
    if (!facts.resize.empty()) {
        file.metadata["gyre.resize"] = facts.resize;
    }
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
            if (found == read.end() && tensor.name == Optimizer::kStepRest) {
                continue;  // an earlier version's
            }
            if (comm.is_root() && found == read.end()) {
                throw input_error(
                    fmt::format("`resume` {}: the optimiser's state lacks {} in its shape; take "
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

std::string resolve_resume(const CheckpointSpec& spec, bool is_root) {
    if (spec.resume != kAutoResume) {
        return spec.resume;
    }
    if (is_root && spec.save.empty()) {
        throw usage_error("`resume` auto looks in the folder of `save`: give that, too");
    }
    std::error_code error;
    return is_root && fs::exists(last_checkpoint(spec.save), error) ? spec.save : "";
}

CheckpointFiles::CheckpointFiles(const RunSpec& run, const WeightFacts& facts,
                                 const Identity& identity, bool is_root)
    : spec_(run.checkpoints),
      stop_(run.stop),
      facts_(facts),
      identity_(identity),
      is_root_(is_root),
      saves_(!spec_.save.empty()) {
    if (is_root && saves_) {
        open_folder(spec_);
        writer_ = std::make_unique<CheckpointWriter>(spec_.save, spec_.keep);
    }
}

int CheckpointFiles::virtual_ranks(Communicator& comm) {
    int count = 0;
    agree(comm, [&] {
        if (is_root_) {
            read_ = read_checkpoint(spec_.resume);
            count = train::virtual_ranks(read_->identity);
        }
    });
    comm.broadcast(&count, sizeof count, 0);
    return count;
}

Cursor CheckpointFiles::resume(Session& session) {
    Communicator& comm = session.communicator();
    Checkpoint checkpoint;
    agree(comm, [&] {
        if (!is_root_) {
            return;
        }
        checkpoint = read_ ? std::move(*read_) : read_checkpoint(spec_.resume);
        read_.reset();
        require_same(checkpoint.identity, identity_, "`resume` " + spec_.resume,
                     "or begin a new training from its weights with `init`");
        session.net().import_parameters(checkpoint.weights.tensors, spec_.resume);
    });
    share_state(session, checkpoint.optimizer, spec_.resume);
    session.share_parameters();
    comm.broadcast(&checkpoint.cursor, sizeof checkpoint.cursor, 0);
    return checkpoint.cursor;
}

std::optional<KeptNet> CheckpointFiles::best(Session& session) const {
    bool found = false;
    agree(session.communicator(), [&] {
        const fs::path file = best_checkpoint(spec_.resume);
        found = is_root_ && fs::exists(file);
        if (found) {
            session.net().import_parameters(read_weights(file).tensors, file.string());
        }
    });
    session.communicator().broadcast(&found, sizeof found, 0);
    if (!found) {
        return std::nullopt;
    }
    session.share_parameters();
    return KeptNet(session.backend(), session.net());
}

bool CheckpointFiles::pauses_after(std::int64_t steps) {
    due_ = due_ ||
           (saves_ && spec_.every.unit == SaveEvery::Unit::steps && steps % spec_.every.count == 0);
    return due_;
}

bool CheckpointFiles::wants_save() {
    if (!writes() || spec_.every.unit != SaveEvery::Unit::seconds ||
        seconds_since(timed_) < static_cast<double>(spec_.every.count)) {
        return false;
    }
    timed_ = Clock::now();
    return true;
}

void CheckpointFiles::on_pause(const Training& training) {
    save(training, due_ || training.save_requested, false);
    due_ = false;
}

void CheckpointFiles::on_epoch(const Training& training, const EpochFacts& epoch) {
    const SaveEvery& every = spec_.every;
    const bool due = every.unit == SaveEvery::Unit::steps || epoch.epoch == stop_.epochs ||
                     (every.unit == SaveEvery::Unit::epochs && epoch.epoch % every.count == 0);
    save(training, epoch.stopped || due || training.save_requested, epoch.best);
}

void CheckpointFiles::on_end(const Training& training, Ending) {
    if (saves_) {
        agree(training.session.communicator(), [&] {
            if (is_root_) {
                writer_->finish();
            }
        });
    }
}

void CheckpointFiles::save(const Training& training, bool last, bool best) {
    if (!saves_ || !(last || best)) {
        return;
    }
    Session& session = training.session;
    const bool takes_part = is_root_ || session.optimizer().shared_out();
    if (best && session.optimizer().averages()) {
        // The average, from which no training resumes.
        TensorFile weights;
        if (takes_part) {
            session.optimizer().with_average(
                [&] { weights = weights_file(session.net(), facts_); });
        }
        agree(session.communicator(), [&] {
            if (is_root_) {
                writer_->write({.weights = std::move(weights),
                                .optimizer = {},
                                .cursor = training.cursor,
                                .identity = identity_},
                               training.steps(), false, true);
            }
        });
        best = false;
    }
    if (!(last || best)) {
        return;
    }
    std::vector<HostTensor> optimizer;
    if (takes_part) {
        optimizer = session.optimizer().export_state();
    }
    agree(session.communicator(), [&] {
        if (is_root_) {
            writer_->write({.weights = weights_file(session.net(), facts_),
                            .optimizer = std::move(optimizer),
                            .cursor = training.cursor,
                            .identity = identity_},
                           training.steps(), last, best);
        }
    });
}

}  // namespace gyre::train
