// Runs the program itself, alone or under mpirun, for end-to-end tests.
#pragma once

#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "tests/support/built_file.hpp"

namespace gyre::test {

struct Outcome {
    int exit_code = 0;   // 128 + signal where one ended it
    std::string output;  // standard output and error together
    double seconds = 0.0;
};

// How often `part` occurs in `text`.
int count_of(const std::string& text, const std::string& part);

// Runs a shell command line to its end.
Outcome run_shell(const std::string& command);

// The absolute path of the program under test.
std::string gyre_binary();

// `gyre ARGUMENTS`, under `mpirun -np ranks` where ranks > 0.
std::string gyre_command(int ranks, const std::string& arguments);
inline Outcome run_gyre(int ranks, const std::string& arguments) {
    return run_shell(gyre_command(ranks, arguments));
}

// The JSON lines of a file, of one event, or of all where event is empty.
std::vector<nlohmann::json> read_events(const std::filesystem::path& path,
                                        const std::string& event);

// Writes a learnable data set: the label decides where a bright bar stands in a noisy image.
void make_dataset(const std::filesystem::path& directory, int train_images, int test_images,
                  int channels, int height, int width, int classes);

}  // namespace gyre::test
