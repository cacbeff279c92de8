// The subcommands of gyre; each returns an exit code or throws Error.
#pragma once

#include <vector>

#include "comm/communicator.hpp"
#include "train/options.hpp"
#include "train/rooms.hpp"

namespace gyre::train {

// Collective. `flags`: the options as given, which all ranks must share.
ExitCode run_train(Communicator& comm, const TrainOptions& options,
                   const std::vector<ManifestEntry>& flags);
ExitCode run_eval(Communicator& comm, const EvalOptions& options,
                  const std::vector<ManifestEntry>& flags);
// Collective: the ranks measure together, rank 0 reports.
ExitCode run_plan(Communicator& comm, const PlanOptions& options,
                  const std::vector<ManifestEntry>& flags);
ExitCode run_info();

}  // namespace gyre::train
