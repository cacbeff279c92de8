// The files that a training's figures go to: --json, --metrics, --tensorboard. Rank 0 alone has
// them.
#pragma once

#include <fstream>
#include <nlohmann/json_fwd.hpp>
#include <string>

#include "train/cli/options.hpp"

namespace gyre::train {

// A file for lines: a new one, or an old one, emptied unless lines are added; a pipe or a terminal
// will do. Throws Error(bad_input), which begins with the flag, for other devices, and where it
// cannot be written.
std::ofstream open_lines(const char* flag, const std::string& path, bool add = false);

class MetricsFiles {
 public:
    MetricsFiles() = default;  // none
    // Throws Error(bad_input) for a file or folder that cannot be written.
    explicit MetricsFiles(const TrainOptions& options);

    bool any() const { return json_.is_open() || csv_.is_open() || events_.is_open(); }
    // An event, as a JSON line has it: all of them to --json; what a step and an epoch have, to the
    // others. Throws Error(bad_input) where a file takes no more.
    void write(const nlohmann::ordered_json& event);

 private:
    std::ofstream json_, csv_, events_;
};

// A record of TensorBoard's event files around a message (TFRecord): its length, its data, and a
// masked CRC-32C of each.
std::string tensorboard_record(const std::string& message);

}  // namespace gyre::train
