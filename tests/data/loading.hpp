// Shared by the tests of data sets that are not IDX files.
#pragma once

#include <filesystem>
#include <fstream>

#include "data/dataset.hpp"
#include "tests/data/picture_files.hpp"
#include "tests/support/expect_error.hpp"

namespace gyre::test {

using Labels = std::vector<std::int32_t>;
using Names = std::vector<std::string>;

inline void write_bytes(const std::filesystem::path& path, const Bytes& bytes) {
    std::filesystem::create_directories(path.parent_path());
    std::ofstream(path, std::ios::binary)
        .write(reinterpret_cast<const char*>(bytes.data()),
               static_cast<std::streamsize>(bytes.size()));
}

inline Bytes bytes_of(const data::Pixels& pixels) {
    return {pixels.begin(), pixels.end()};
}

inline void expect_bad(const std::filesystem::path& dir, std::initializer_list<std::string> parts,
                       const data::DataSpec& more = {}) {
    data::DataSpec options = more;
    options.path = dir.string();
    expect_error(ExitCode::bad_input, parts, [&] { data::load_dataset(options); });
}

}  // namespace gyre::test
