// The flags of a table of settings, by CLI11.
#pragma once

#include <CLI/CLI.hpp>
#include <vector>

#include "comm/communicator.hpp"
#include "train/rooms.hpp"
#include "train/setting.hpp"

namespace gyre::train {

// Adds the flags, with their headings, and --help.
void add_flags(CLI::App& app, const std::vector<Setting>& rows);

// The values that all ranks must share, for comparing them.
std::vector<ManifestEntry> manifest_of(const std::vector<Setting>& rows);

}  // namespace gyre::train
