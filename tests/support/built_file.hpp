// The files of a build, found from the running test program. Their paths are not compiled in, so
// that a compiler cache serves all clones.
#pragma once

#include <filesystem>
#include <string>

namespace gyre::test {

// The absolute path of a file in the build folder, which holds the test programs.
inline std::string built_file(const std::string& name) {
    return (std::filesystem::read_symlink("/proc/self/exe").parent_path() / name).string();
}

}  // namespace gyre::test
