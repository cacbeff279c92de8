// The words of the command line before CLI11 reads them: what the PyTorch tutorials call otherwise
// gets gyre's name, and what gyre does not know is answered.
#pragma once

#include <CLI/CLI.hpp>
#include <string>
#include <vector>

namespace gyre::train {

// The arguments after the program's name, with gyre's names. Throws Error(usage) that lists, in the
// order typed, the flags that gyre does not have, each with what was meant or does the same.
std::vector<std::string> translate_arguments(const CLI::App& app,
                                             const std::vector<std::string>& given);

// "see `gyre train --help`", of the subcommand that was typed.
std::string help_hint(const CLI::App& app, const std::vector<std::string>& given);

}  // namespace gyre::train
