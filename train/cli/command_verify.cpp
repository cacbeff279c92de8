// gyre verify: trains again as a receipt says, and compares the state with its hashes.
#include <fmt/format.h>

#include <string>

#include "model/whole_file.hpp"
#include "train/cli/commands.hpp"
#include "train/receipt.hpp"
#include "train/settings.hpp"

namespace gyre::train {
namespace {

constexpr std::size_t kMostMib = 256;  // several million hashes

// The receipt's text. Collective: rank 0 reads it.
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
            text = *read;
        }
    });
    return broadcast_string(comm, text, 0);
}

// Returns the settings of the receipt's training, except for those of the place where it runs now.
RunSpec run_of(const Receipt& receipt, const VerifyOptions& now) {
    RunSpec run;
    const std::vector<Setting> rows = settings(run);
    for (const auto& [name, value] : receipt.settings) {
        const Setting* const row = find(rows, name);
        const std::string problem =
            row == nullptr ? "this version of gyre has no such setting" : row->set(value);
        if (!problem.empty()) {
            throw input_error(
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
    if (now.device.device != RunSpec().device.device) {
        run.device.device = now.device.device;
    }
    if (!now.data.path.empty()) {
        run.data.path = now.data.path;
    }
    return run;
}

}  // namespace

ExitCode run_verify(Communicator& comm, const VerifyOptions& options) {
    const std::string text = receipt_text(comm, options.run);
    Verification verification(parse_receipt(text, receipt_file(options.run).string()), options.run);
    const ExitCode code = run_train(comm, run_of(verification.receipt(), options), &verification);
    const std::int64_t last = verification.receipt().hashes.rbegin()->first;
    if (code == ExitCode::success && verification.same_until() < last) {
        throw AgreedError(ExitCode::differs,
                          fmt::format("{}: identical to step {}, but the training ends before step "
                                      "{}, the receipt's last",
                                      options.run, verification.same_until(), last));
    }
    if (code == ExitCode::success && comm.is_root()) {
        fmt::print("{}: identical to step {} ({} hashes)\n", options.run, verification.same_until(),
                   verification.compared());
    }
    return code;
}

}  // namespace gyre::train
