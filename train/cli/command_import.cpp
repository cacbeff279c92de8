// gyre import: an ONNX model as a model file and weights, by scripts/import_onnx.py, which the
// program has within it and gives to a Python.
#include <fmt/format.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>

#include "data/resize.hpp"
#include "train/cli/commands.hpp"
#include "train/cli/import_onnx.hpp"

namespace gyre::train {

ExitCode run_import(const ImportOptions& options) {
    const char* const given = std::getenv("PYTHON");
    const std::string python = given == nullptr ? "python3" : given;
    std::vector<std::string> words = {python,      "-c", kImportScript,
                                      options.net, "-o", options.output};
    const std::string resize = options.resize ? resize_text(*options.resize) : "";
    for (const auto& [flag, value] :
         {std::pair{"--mean=", &options.mean}, {"--std=", &options.std}, {"--resize=", &resize}}) {
        if (!value->empty()) {
            words.push_back(flag + *value);
        }
    }
    std::vector<char*> arguments;
    for (std::string& word : words) {
        arguments.push_back(word.data());
    }
    arguments.push_back(nullptr);
    pid_t child = 0;
    int status = posix_spawnp(&child, arguments[0], nullptr, nullptr, arguments.data(), environ);
    if (status != 0) {
        throw input_error(fmt::format(
            "gyre import needs Python with the package onnx, but '{}' does not start: {}; install "
            "them (Debian, Ubuntu: apt-get install python3-onnx), or name another Python in PYTHON",
            python, std::strerror(status)));
    }
    while (waitpid(child, &status, 0) < 0 && errno == EINTR) {
    }
    if (status != 0) {
        throw input_error(
            fmt::format("{}: it could not be imported, as it says above", options.net));
    }
    return ExitCode::success;
}

}  // namespace gyre::train
