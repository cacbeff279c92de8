// The subcommands of gyre: each has a row in commands(), with its flags, and a function.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "comm/communicator.hpp"
#include "train/cli/options.hpp"
#include "train/rooms.hpp"

namespace gyre::train {

class FitObserver;
struct Receipt;

// The additional arguments of a training that is repeated from its receipt.
struct Repetition {
    const Receipt& receipt;  // whose identity the training must have
    std::string place;       // of the receipt, in messages
    std::vector<FitObserver*> observers;
};

// Each returns an exit code or throws Error. These are collective, with options that all ranks
// share except for those that concern one rank only.
ExitCode run_train(Communicator& comm, const RunSpec& options,
                   const Repetition* repetition = nullptr);
ExitCode run_verify(Communicator& comm, const VerifyOptions& options);
ExitCode run_replay(Communicator& comm, const ReplayOptions& options);
ExitCode run_eval(Communicator& comm, const EvalOptions& options);
// The ranks measure together, rank 0 reports.
ExitCode run_plan(Communicator& comm, const PlanOptions& options);
// These are for one process.
ExitCode run_predict(Communicator& comm, const PredictOptions& options);
ExitCode run_export(const ExportOptions& options);
ExitCode run_import(const ImportOptions& options);
ExitCode run_info(const InfoOptions& options);
ExitCode run_diff(const DiffOptions& options);
ExitCode run_plot(const PlotOptions& options);
// Starts ranks on this host, each with these words; returns the exit code of the first that failed.
int run_launch(const LaunchCommandOptions& options, const std::vector<std::string>& command);

// Where each subcommand's flags write.
struct Options {
    RunSpec train;
    VerifyOptions verify;
    ReplayOptions replay;
    EvalOptions eval;
    PlanOptions plan;
    InfoOptions info;
    PredictOptions predict;
    ExportOptions exported;
    ImportOptions imported;
    DiffOptions diff;
    PlotOptions plot;
    LaunchCommandOptions launch;
};

struct Command {
    std::string name, about, examples;  // examples: lines for the end of --help; may be empty
    std::vector<Setting> flags;
    // How its ranks meet and wait for each other; null: they wait for nothing for long.
    const LaunchSpec* launch = nullptr;
    bool collective = false;                     // otherwise only rank 0 runs it
    std::function<ExitCode(Communicator&)> run;  // null: it starts ranks, and is none
};
std::vector<Command> commands(Options& options);

}  // namespace gyre::train
