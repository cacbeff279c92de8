// gyre verify and gyre replay: they train again as a receipt says, and compare the state with its
// hashes.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <string>

#include "model/whole_file.hpp"
#include "train/cli/commands.hpp"
#include "train/receipt.hpp"
#include "train/replay.hpp"
#include "train/settings.hpp"

namespace gyre::train {
namespace {

constexpr std::size_t kMostMib = 256;  // several million hashes

// Returns the text of a receipt, which rank 0 has read and found to be one. Collective.
std::string receipt_text(Communicator& comm, const std::string& folder) {
    std::string text;
    agree(comm, [&] {
        if (comm.is_root()) {
            std::string why;
            const auto read = read_text(receipt_file(folder), why, kMostMib);
            if (!read) {
                throw input_error(fmt::format(
                    "{}: no receipt can be read there: {}; name the folder of a training that was "
                    "saved with --save by this version of gyre or a later one",
                    receipt_file(folder).string(), why));
            }
            parse_receipt(*read, receipt_file(folder).string());
            text = *read;
        }
    });
    return broadcast_string(comm, text, 0);
}

Verification verification_of(Communicator& comm, const VerifyOptions& options) {
    return {parse_receipt(receipt_text(comm, options.run), receipt_file(options.run).string()),
            options.run};
}

// Returns the settings of the receipt's training, except for those of the place where it runs now.
RunSpec run_of(const Receipt& receipt, const VerifyOptions& now) {
    RunSpec run;
    run.batch.automatic_shards = false;  // they are in the receipt, if there are any
    const std::vector<Setting> rows = settings(run);
    for (const auto& [name, value] : receipt.settings) {
        const Setting* const row = find(rows, name);
        const std::string problem =
            row == nullptr ? "this version of gyre has no such setting" : row->set(value);
        if (!problem.empty()) {
            throw AgreedError(
                ExitCode::bad_input,
                fmt::format("{}: its training had `{}` '{}': {}; verify it with gyre {}",
                            receipt_file(now.run).string(), name, value, problem, receipt.version));
        }
    }
    run.checkpoints = {.resume = now.from};
    run.reports = {};
    run.stop.max_seconds = {};
    const bool share_gpu = run.launch.share_gpu;
    run.launch = now.launch;
    run.launch.share_gpu = share_gpu;
    run.device.threads = now.device.threads;
    run.device.graph_steps = 1;  // so that a pause can come after any step
    if (now.device.device != RunSpec().device.device) {
        run.device.device = now.device.device;
    }
    if (!now.data.path.empty()) {
        run.data.path = now.data.path;
    }
    return run;
}

// Returns the last numbered checkpoint of a folder that is not after this many steps, or nothing.
std::string last_before(const std::string& folder, std::int64_t steps) {
    std::string found;
    for (const std::filesystem::path& file : numbered_checkpoints(folder)) {
        if (step_of(file) <= steps) {
            found = file.string();
        }
    }
    return found;
}

void print(const ReplayedStep& step, std::int64_t number) {
    const StepResult& result = step.result;
    fmt::print("step {}: step {} of epoch {}, {} images, loss {:.6f}, learning rate {:.6g}\n\n",
               number, result.step + 1, step.epoch, step.images.size(), result.loss,
               result.learning_rate);
    fmt::print("{:>10} {:>10} {:>6} {:>9} {:>11}\n", "position", "image", "label", "predicted",
               "loss");
    for (std::size_t i = 0; i < step.images.size(); ++i) {
        const ReplayedImage& image = step.images[i];
        fmt::print("{:>10} {:>10} {:>6} {:>9} {:>11.6f}\n", i, image.image, image.label,
                   image.predicted, image.loss);
    }
    std::size_t width = 0;
    for (const ReplayedParameter& parameter : step.parameters) {
        width = std::max(width, fmt::format("{} {}", parameter.name, parameter.shape).size());
    }
    fmt::print("\n{:{}} {:>11} {:>11} {:>11}\n", "norm of", width, "weights", "gradient", "update");
    for (const ReplayedParameter& parameter : step.parameters) {
        fmt::print("{:{}} {:>11.5g} {:>11.5g} {:>11.5g}\n",
                   fmt::format("{} {}", parameter.name, parameter.shape), width, parameter.weights,
                   parameter.gradient, parameter.update);
    }
}

}  // namespace

ExitCode run_verify(Communicator& comm, const VerifyOptions& options) {
    Verification verification = verification_of(comm, options);
    if (!options.to.empty()) {
        Cursor end;
        agree(comm, [&] {
            if (comm.is_root()) {
                end = read_checkpoint(options.to).cursor;
            }
        });
        comm.broadcast(&end, sizeof end, 0);
        verification.end_at(end);
    }
    const Repetition repetition{verification.receipt(), verification.place(), {&verification}};
    const ExitCode code = run_train(comm, run_of(verification.receipt(), options), &repetition);
    if (code == ExitCode::success && verification.same_until() < verification.last()) {
        throw AgreedError(ExitCode::differs,
                          fmt::format("{}: identical to step {}, but the training ends before step "
                                      "{}, the receipt's last",
                                      options.run, verification.same_until(), verification.last()));
    }
    if (code == ExitCode::success && comm.is_root()) {
        fmt::print("{}: identical to step {} ({} hash{})\n", options.run, verification.same_until(),
                   verification.compared(), verification.compared() == 1 ? "" : "es");
    }
    return code;
}

ExitCode run_replay(Communicator& comm, const ReplayOptions& options) {
    Verification verification = verification_of(comm, options);
    const Receipt& receipt = verification.receipt();
    if (receipt.hashes.empty() || options.step > receipt.hashes.rbegin()->first) {
        throw AgreedError(
            ExitCode::usage,
            fmt::format("--step {}: the training in {} has {} steps", options.step, options.run,
                        receipt.hashes.empty() ? 0 : receipt.hashes.rbegin()->first));
    }
    RunSpec run = run_of(receipt, options);
    if (options.from.empty()) {
        std::string from = comm.is_root() ? last_before(options.run, options.step - 1) : "";
        run.checkpoints.resume = broadcast_string(comm, from, 0);
    }
    run.reports.quiet = true;
    Replay replay(options.step);
    const Repetition repetition{receipt, verification.place(), {&verification, &replay}};
    const ExitCode code = run_train(comm, run, &repetition);
    if (code == ExitCode::success && !replay.ends()) {
        throw AgreedError(ExitCode::differs, fmt::format("{}: the training ends before step {}",
                                                         options.run, options.step));
    }
    if (code == ExitCode::success && comm.is_root()) {
        print(*replay.step(), options.step);
    }
    return code;
}

}  // namespace gyre::train
