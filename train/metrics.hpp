// The files that a training's figures go to: JSON lines, CSV, and TensorBoard's event files.
#pragma once

#include <fstream>
#include <map>
#include <nlohmann/json_fwd.hpp>
#include <string>

#include "train/fit.hpp"
#include "train/rooms.hpp"

namespace gyre::train {

// A file for lines: a new one, or an old one, emptied unless lines are added; a pipe or a terminal
// will do. Throws Error(bad_input), which begins with the option, for other devices, and if it
// cannot be written.
std::ofstream open_lines(const char* option, const std::string& path, bool add = false);

// Only rank 0 has files. on_end() is collective, as it asks for all ranks' memory.
class MetricsFiles final : public FitObserver {
 public:
    // Throws Error(bad_input) for a file or folder that cannot be written. run must outlive the
    // object.
    MetricsFiles(const RunSpec& run, bool is_root);

    void on_start(const Training& training) override;
    void on_step(const Training& training, const StepResult& done) override;
    void on_epoch(const Training& training, const EpochFacts& epoch) override;
    void on_end(const Training& training, Ending ending) override;

 private:
    // Forgets what an earlier run has written of steps and epochs that this one does again.
    void drop_later_lines(const Training& training);
    bool any() const { return metrics_.is_open() || !events_.empty(); }
    // An event, as a JSON line has it: all of them to the JSON lines; what a step and an epoch
    // have, to the others. Throws Error(bad_input) if a file takes no more.
    void write(const nlohmann::ordered_json& event);

    const RunSpec& run_;
    std::ofstream metrics_;
    // By the images that figures are of ("train", "test" or "val"), each in a folder of that name:
    // TensorBoard draws figures of one name into one chart. "": all other figures.
    std::map<std::string, std::ofstream> events_;
    std::string metrics_place_, events_place_;  // each one's option and path
    bool rows_ = false;                         // of the metrics: CSV, otherwise JSON lines
};

// A record of TensorBoard's event files around a message (TFRecord): its length, its data, and a
// masked CRC-32C of each.
std::string tensorboard_record(const std::string& message);

}  // namespace gyre::train
