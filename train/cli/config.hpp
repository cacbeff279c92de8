// --config: settings under a name, or in a file, which a command line may override.
#pragma once

#include <CLI/CLI.hpp>
#include <string>
#include <vector>

namespace gyre::train {

// The names of the configurations that gyre brings.
std::vector<std::string> config_names();

// The words of a command line, as translate_arguments returns them, without --config and with the
// flags of what it names, unless the command line has them itself. Of several, the later ones
// count. Throws Error(usage) with the file and, if one is to blame, the line.
std::vector<std::string> with_config(const CLI::App& app, const std::vector<std::string>& words);

}  // namespace gyre::train
