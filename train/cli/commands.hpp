// The subcommands of gyre; each returns an exit code or throws Error.
#pragma once

#include "comm/communicator.hpp"
#include "train/cli/options.hpp"
#include "train/rooms.hpp"

namespace gyre::train {

// Collective, with options that all ranks share but for those that concern one rank only.
ExitCode run_train(Communicator& comm, const TrainOptions& options);
ExitCode run_eval(Communicator& comm, const EvalOptions& options);
// Collective: the ranks measure together, rank 0 reports.
ExitCode run_plan(Communicator& comm, const PlanOptions& options);
// Starts ranks on this host, each with these words; returns the exit code of the first that failed.
int run_launch(const LaunchCommandOptions& options, const std::vector<std::string>& command);
// Of one process.
ExitCode run_predict(Communicator& comm, const PredictOptions& options);
ExitCode run_export(const ExportOptions& options);
ExitCode run_info(const InfoOptions& options);
ExitCode run_plot(const PlotOptions& options);

}  // namespace gyre::train
