#include "train/receipt.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <cerrno>
#include <cstring>
#include <iterator>
#include <limits>
#include <nlohmann/json.hpp>
#include <sstream>
#include <utility>

#include "base/json_integer.hpp"
#include "base/printable.hpp"
#include "model/difference.hpp"
#include "model/whole_file.hpp"
#include "train/hash.hpp"
#include "train/settings.hpp"

namespace gyre::train {
namespace {

constexpr int kFormat = 2;
constexpr const char* kStart = "start";

// Shows what a checkpoint of this moment would have. Collective if the optimiser's state is shared
// out; others than rank 0 have nothing to do otherwise.
void visit_tensors(Session& session, const TensorVisitor& visit) {
    if (session.communicator().is_root() || session.optimizer().shared_out()) {
        session.net().visit_parameters(visit);
        session.optimizer().visit_state(
            [&](const std::string& name, const std::vector<std::int64_t>& shape,
                std::span<const float> values) { visit(state_name(name), shape, values); });
    }
}

// Returns whether the steps of an epoch are done but not its evaluation, which may change the state
// (a learning rate that follows the loss). No hash is taken then, but at the epoch's end.
bool before_evaluation(const Training& training) {
    return training.cursor.step == training.session.sharding().steps();
}

}  // namespace

std::filesystem::path receipt_file(const std::filesystem::path& folder) {
    return folder / "receipt.jsonl";
}

Receipt parse_receipt(const std::string& text, const std::string& place) {
    Receipt receipt;
    std::istringstream in(text);
    int number = 0;
    bool started = false;
    for (std::string line; std::getline(in, line) && !in.eof();) {
        ++number;
        try {
            const auto json = nlohmann::json::parse(line);
            if (json.at("event") == kStart) {
                if (json.at("receipt") != kFormat) {
                    throw input_error(
                        fmt::format("format {}, which this version of gyre does not "
                                    "know",
                                    json.at("receipt").dump()));
                }
                json.at("version").get_to(receipt.version);
                json.at("settings").get_to(receipt.settings);
                receipt.identity = parse_identity(json.at("identity").dump());
                started = true;
            } else if (started) {
                const auto step = json_integer<std::int64_t>(json.at("step"));
                receipt.hashes[step] = json.at("hash").get<std::string>();
            } else {
                throw input_error("a line before that of the start");
            }
        } catch (const std::exception& problem) {
            throw input_error(fmt::format("{}, line {}: that is not a line of a receipt: {}", place,
                                          number, printable(problem.what())));
        }
    }
    if (!started) {
        throw input_error(
            fmt::format("{}: the receipt has no line; name the folder of a training "
                        "that was saved with `save`",
                        place));
    }
    return receipt;
}

std::string state_hash(Session& session) {
    Communicator& comm = session.communicator();
    SlicesHash hash;
    const auto add = [&](const std::string& name, std::int64_t first_elem,
                         std::span<const float> values, bool on_all_ranks) {
        if (on_all_ranks) {  // of which this rank takes its part
            const auto blocks = (std::ssize(values) + 15) / 16;
            const auto from = blocks * comm.rank() / comm.size() * 16;
            const auto to =
                std::min(blocks * (comm.rank() + 1) / comm.size() * 16, std::ssize(values));
            values = values.subspan(static_cast<std::size_t>(from),
                                    static_cast<std::size_t>(std::max(to - from, {})));
            first_elem += from;
        }
        hash.add(name, first_elem, values);
    };
    // The net's running statistics follow its parameters. Until an evaluation, ranks may have their
    // own; those of rank 0 count, as in a checkpoint.
    auto parameters_left = session.net().parameters().size();
    session.net().visit_parameters([&](const std::string& name, const std::vector<std::int64_t>&,
                                       std::span<const float> values) {
        const bool is_parameter = parameters_left > 0;
        parameters_left -= is_parameter ? 1 : 0;
        add(name, 0, is_parameter || comm.is_root() ? values : values.first(0), is_parameter);
    });
    session.optimizer().visit_slices(
        [&](const std::string& name, std::int64_t first_elem, std::span<const float> values,
            bool on_all_ranks) { add(state_name(name), first_elem, values, on_all_ranks); });
    return hash.text(comm);
}

void ReceiptWriter::on_start(const Training& training) {
    agree(training.session.communicator(), [&] {
        if (!is_root_) {
            return;
        }
        const std::filesystem::path path = receipt_file(run_.checkpoints.save);
        std::string kept;
        if (training.resumed) {  // without what this training does again
            std::ifstream in(path);
            for (std::string line; std::getline(in, line) && !in.eof();) {
                const auto json = nlohmann::json::parse(line, nullptr, false);
                const bool later = json.is_object() && json.contains("step") &&
                                   json["step"].is_number() && json["step"] > training.steps();
                kept += later ? "" : line + '\n';
            }
        }
        model::write_whole_file({path}, {kept}, "the receipt");
        file_.open(path, std::ios::app);
        nlohmann::ordered_json settings = nlohmann::ordered_json::object();
        for (const SettingValue& setting : values_of(run_)) {
            if (setting.given) {
                settings[setting.name] = setting.value;
            }
        }
        const nlohmann::ordered_json start = {
            {"event", kStart},
            {"receipt", kFormat},
            {"version", GYRE_VERSION},
            {"settings", settings},
            {"identity", nlohmann::ordered_json::parse(identity_text(identity_))},
            {"ranks", training.session.communicator().size()},
            {"device", training.session.backend().description()},
            {"communicator", training.session.communicator().description()},
            {"from_step", training.steps()}};
        write(start.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace));
    });
}

bool ReceiptWriter::pauses_after(std::int64_t steps) {
    const SaveEvery& every = run_.checkpoints.every;
    const std::int64_t own = run_.checkpoints.receipt_every;
    due_ = due_ || (every.unit == SaveEvery::Unit::steps && steps % every.count == 0) ||
           (own > 0 && steps % own == 0);
    return due_;
}

void ReceiptWriter::on_pause(const Training& training) {
    if (due_ || training.save_requested) {
        add(training);
    }
    due_ = false;
}

void ReceiptWriter::on_epoch(const Training& training, const EpochFacts&) {
    add(training);
}

void ReceiptWriter::add(const Training& training) {
    if (before_evaluation(training)) {
        return;
    }
    const std::string hash = state_hash(training.session);
    agree(training.session.communicator(), [&] {
        if (is_root_) {
            write(nlohmann::ordered_json{
                {"event", "state"}, {"step", training.steps()}, {"hash", hash}}
                      .dump());
        }
    });
}

void ReceiptWriter::write(const std::string& line) {
    file_ << line << std::endl;
    if (!file_) {
        throw input_error(fmt::format(
            "{}: writing failed: {}; is the disk full? Make room there, and resume the training "
            "from its last checkpoint",
            receipt_file(run_.checkpoints.save).string(), std::strerror(errno)));
    }
}

void Verification::on_start(const Training& training) {
    same_until_ = training.steps();
    const std::int64_t end =
        end_ ? training.steps_before(*end_) : std::numeric_limits<std::int64_t>::max();
    const auto after = receipt_.hashes.upper_bound(end);
    last_ = after == receipt_.hashes.begin() ? 0 : std::prev(after)->first;
    if (last_ <= same_until_) {
        throw AgreedError(
            ExitCode::bad_input,
            fmt::format("{}: no hash after step {}{}; verify from an earlier "
                        "checkpoint, or from the start",
                        place(), same_until_, end_ ? fmt::format(" up to step {}", end) : ""));
    }
}

bool Verification::pauses_after(std::int64_t steps) {
    return receipt_.hashes.contains(steps);
}

bool Verification::ends() {
    return same_until_ >= last_;
}

void Verification::compare(const Training& training) {
    const std::int64_t step = training.steps();
    const auto expected = receipt_.hashes.find(step);
    if (expected == receipt_.hashes.end() || step == same_until_ || before_evaluation(training)) {
        return;
    }
    Communicator& comm = training.session.communicator();
    if (state_hash(training.session) != expected->second) {
        const std::vector<HostTensor> state =
            copies([&](const TensorVisitor& visit) { visit_tensors(training.session, visit); });
        const std::string where =
            broadcast_string(comm, comm.is_root() ? difference(training, state) : "", 0);
        throw AgreedError(
            ExitCode::differs,
            fmt::format("{}: not the same training: it parts after step {} and at step {} at the "
                        "latest{}",
                        place(), same_until_, step, where));
    }
    same_until_ = step;
    ++compared_;
}

std::string Verification::difference(const Training& training,
                                     const std::vector<HostTensor>& state) const {
    std::vector<std::filesystem::path> files = numbered_checkpoints(folder_);
    files.push_back(last_checkpoint(folder_));
    for (const std::filesystem::path& file : files) {
        Checkpoint saved;
        try {
            saved = read_checkpoint(file);
        } catch (const Error&) {
            continue;  // it is not there, or damaged, and tells nothing
        }
        if (training.steps_before(saved.cursor) != training.steps()) {
            continue;
        }
        const std::vector<std::string> lines =
            tensor_differences(checkpoint_file(std::move(saved)).tensors, state);
        return lines.empty() ? fmt::format("; {} is as it is now", file.string())
                             : fmt::format("; of {}, {} tensors differ: {}", file.string(),
                                           lines.size(), printable(lines.front()));
    }
    return fmt::format(
        "; no checkpoint of that step is there to compare with: train with "
        "`save-every` and `keep`");
}

}  // namespace gyre::train
