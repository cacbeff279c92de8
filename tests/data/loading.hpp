// Shared by the tests of data sets that are not IDX files.
#pragma once

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <initializer_list>
#include <string>
#include <vector>

#include "data/dataset.hpp"
#include "tests/data/picture_files.hpp"
#include "tests/support/expect_error.hpp"
#include "tests/support/temp_dir.hpp"

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

inline Bytes joined(std::initializer_list<Bytes> parts) {
    Bytes all;
    for (const Bytes& part : parts) {
        all.insert(all.end(), part.begin(), part.end());
    }
    return all;
}

inline void expect_bad(const std::filesystem::path& dir, std::initializer_list<std::string> parts,
                       const data::DataSpec& more = {}) {
    data::DataSpec options = more;
    options.path = dir.string();
    expect_error(ExitCode::bad_input, parts, [&] { data::load_dataset(options); });
}

// A temporary cache folder.
class CacheFolder {
 public:
    CacheFolder() {
        const char* before = std::getenv("XDG_CACHE_HOME");
        before_ = before == nullptr ? "" : before;
        use(dir_.path());
    }
    ~CacheFolder() {
        if (before_.empty()) {
            unsetenv("XDG_CACHE_HOME");
        } else {
            setenv("XDG_CACHE_HOME", before_.c_str(), 1);
        }
    }
    void use(const std::filesystem::path& path) { setenv("XDG_CACHE_HOME", path.c_str(), 1); }
    std::vector<std::filesystem::path> images() const {
        std::vector<std::filesystem::path> files;
        for (const auto& entry : std::filesystem::recursive_directory_iterator(dir_.path())) {
            if (entry.path().extension() == ".images") {
                files.push_back(entry.path());
            }
        }
        return files;
    }
    std::size_t files() const {
        const std::filesystem::recursive_directory_iterator all(dir_.path()), end;
        return static_cast<std::size_t>(
            std::count_if(all, end, [](const auto& entry) { return entry.is_regular_file(); }));
    }

 private:
    TempDir dir_;
    std::string before_;
};

}  // namespace gyre::test
