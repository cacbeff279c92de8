// Files that are written whole, or not at all, and text files that are read whole.
#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace gyre::model {

// Writes the pieces, one after another, as one file for all names, which are in one folder. Written
// beside them, synchronised with the disk and renamed, one name after another, so that a reader
// finds the old file or the new one whole, also after a loss of power. Devices, pipes and
// folders stay as they are; a link gives way to the file. Throws Error(bad_input) that calls the
// content `what`; names that have not been reached then are untouched.
void write_whole_file(const std::vector<std::filesystem::path>& names,
                      const std::vector<std::string_view>& pieces, const char* what);

// The text of a file or pipe, such as a model or a configuration that a person writes. Nothing
// if it cannot be read or has more than most_mib MiB, as /dev/zero has; `why` then says so.
std::optional<std::string> read_text(const std::filesystem::path& path, std::string& why,
                                     std::size_t most_mib = 1);

}  // namespace gyre::model
