// Files that are there whole, or not at all.
#pragma once

#include <filesystem>
#include <string_view>
#include <vector>

namespace gyre::model {

// Writes the pieces, one after another, as one file for all names, which are in one folder. Written
// beside them, synchronised with the disk and renamed, one name after another, so that a reader
// finds the old file or the new one whole, also after a loss of power. Throws Error(bad_input) that
// calls the content `what`; names that have not been reached then are untouched.
void write_whole_file(const std::vector<std::filesystem::path>& names,
                      const std::vector<std::string_view>& pieces, const char* what);

}  // namespace gyre::model
