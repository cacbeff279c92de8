// Recipes: flags under a name, or in a file, to which a command line may add and which it may
// override.
#pragma once

#include <CLI/CLI.hpp>
#include <string>
#include <vector>

namespace gyre::train {

// The names of the recipes that gyre brings.
std::vector<std::string> recipe_names();

// The words of a command line, as translate_arguments returns them; where they have --recipe, with
// its flags too, but for those that the command line has itself. Throws Error(usage) with the
// recipe's name, and the line where one is to blame.
std::vector<std::string> with_recipe(const CLI::App& app, const std::vector<std::string>& words);

}  // namespace gyre::train
