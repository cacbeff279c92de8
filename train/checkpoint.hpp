// A training on disk, from which it resumes to the last bit: one safetensors file with the weights
// under the names of PyTorch's state_dict, the optimiser's state as `optimizer.NAME`
// (Optimizer::export_state), and metadata. docs/checkpoints.md describes it.
#pragma once

#include <cstdint>
#include <filesystem>
#include <future>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "comm/communicator.hpp"
#include "model/safetensors.hpp"
#include "train/rooms.hpp"
#include "train/setting.hpp"

namespace gyre::train {

// The next step, and the epoch's sums so far.
struct Cursor {
    int epoch = 1;          // from 1
    std::int64_t step = 0;  // of the epoch, from 0; the number of its steps: its evaluation
    double loss_sum = 0.0;  // over the epoch's images so far
    std::int64_t images = 0, correct = 0;
    double best_accuracy = -1.0;  // of the test set; < 0: none yet
    int best_epoch = 0;           // that had it, the first of several; 0: none yet
};

// Everything that must be the same when a training is resumed: the settings that must match, by
// their names, and what follows from others, from the data and from the ranks, by the keys of
// kFacts.
struct Identity {
    Values settings, facts;
};
// The keys of facts, and what they are called in messages.
inline const Values kFacts = {{"communicator", "the communicator"},
                              {"data_set", "the data set"},
                              {"device", "the device"},
                              {"global_batch", "the global batch"},
                              {"model", "the model"},
                              {"ranks", "the number of ranks"},
                              {"schedule_steps", "the steps of the schedule"}};

// The key of a checkpoint's identity in its metadata.
constexpr const char* kSettingsKey = "gyre.settings";
constexpr const char* kHashKey = "gyre.hash";  // of its content
// Reads what is there, JSON of any schema so far. Throws std::exception.
Identity parse_identity(const std::string& json);
std::string identity_text(const Identity& identity);
// Returns the training's BatchSpec::shards.
int virtual_ranks(const Identity& identity);
// Returns the names that are in either.
std::set<std::string> names_of(const Values& a, const Values& b);

struct Checkpoint {
    TensorFile weights;                 // with the metadata of those who read only weights
    std::vector<HostTensor> optimizer;  // Optimizer::export_state()
    Cursor cursor;
    Identity identity;
};

// The name in a checkpoint of a tensor of the optimiser's state.
std::string state_name(const std::string& name);
// As it is written; a hash of all of it is in the metadata.
TensorFile checkpoint_file(Checkpoint checkpoint);

// The file of a folder from which its training resumes.
std::filesystem::path last_checkpoint(const std::filesystem::path& folder);
std::filesystem::path best_checkpoint(const std::filesystem::path& folder);
// The file itself, or the last checkpoint of a folder.
std::filesystem::path resolve_checkpoint(const std::filesystem::path& path);
// The files of --keep in a folder, by their steps.
std::vector<std::filesystem::path> numbered_checkpoints(const std::filesystem::path& folder);
// Returns the steps that were done when one of these was written, by its name.
std::int64_t step_of(const std::filesystem::path& numbered);

// path: a file, or the folder of --save. Throws Error(bad_input) for a file that is not a
// checkpoint, or is damaged.
Checkpoint read_checkpoint(const std::filesystem::path& path);
// Any safetensors file. Throws Error(bad_input) for a checkpoint that is not what was written.
TensorFile read_undamaged(const std::filesystem::path& path);
// The same without an optimiser's state.
TensorFile read_weights(const std::filesystem::path& path);
bool has_optimizer_state(const TensorFile& file);
void drop_optimizer_state(TensorFile& file);

// Throws Error(bad_input), naming what differs, unless both are the same. The message begins with
// the place and ends with `otherwise`, after "Give what it had, ".
void require_same(const Identity& saved, const Identity& now, const std::string& place,
                  const std::string& otherwise);

// Writes checkpoints during the training, in a thread of its own, one after another.
class CheckpointWriter {
 public:
    // keep: how many numbered files stay in the folder, with those of earlier runs; 0: all that are
    // there, and no new one is written.
    CheckpointWriter(std::filesystem::path folder, int keep);
    // Lets a file that is being written become whole.
    ~CheckpointWriter();

    // step: of the training, counted over its epochs. last, best: what the file is. Returns when
    // the one before is on the disk; throws what went wrong with that.
    void write(Checkpoint&& checkpoint, std::int64_t step, bool last, bool best);
    // Returns when all is on the disk; throws what went wrong.
    void finish();

 private:
    const std::filesystem::path folder_;
    const int keep_;
    std::vector<std::filesystem::path> kept_;  // numbered ones, in the order they were written
    std::future<void> pending_;
};

}  // namespace gyre::train
