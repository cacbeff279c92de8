// The flags of gyre train's checkpoints.
#pragma once

#include <CLI/CLI.hpp>

#include "train/cli/options.hpp"

namespace gyre::train {

void add_save_flags(CLI::App& app, TrainOptions& options);

}  // namespace gyre::train
