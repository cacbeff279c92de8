// The command line of gyre's subcommands, by CLI11.
#pragma once

#include <CLI/CLI.hpp>

#include "comm/communicator.hpp"
#include "train/cli/options.hpp"
#include "train/rooms.hpp"

namespace gyre::train {

void add_train_flags(CLI::App& app, TrainOptions& options);
void add_eval_flags(CLI::App& app, EvalOptions& options);
void add_launch_flags(CLI::App& app, LaunchCommandOptions& options);
void add_predict_flags(CLI::App& app, PredictOptions& options);
void add_plan_flags(CLI::App& app, PlanOptions& options);
void add_export_flags(CLI::App& app, ExportOptions& options);
// Of gyre train.
void add_trace_flags(CLI::App& app, TrainOptions& options);
void add_info_flags(CLI::App& app, InfoOptions& options);
void add_plot_flags(CLI::App& app, PlotOptions& options);

// Of several subcommands.
void add_threads_flag(CLI::App& app, int& threads);
void add_device_flag(CLI::App& app, std::string& device, const char* description);
void add_precision_flag(CLI::App& app, CommonOptions& options);

// The flags as they were given, for comparing the ranks; without those that concern one rank only.
std::vector<ManifestEntry> flag_manifest(const CLI::App& app);
// Of them, those that a training must have again where it is resumed.
Settings resumed_flags(const CLI::App& app);

}  // namespace gyre::train
