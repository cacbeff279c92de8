// The files that gyre train reads and writes on rank 0: --save, --resume, --init.
#pragma once

#include <memory>

#include "comm/communicator.hpp"
#include "data/dataset.hpp"
#include "model/net.hpp"
#include "train/checkpoint.hpp"
#include "train/cli/options.hpp"

namespace gyre::train {

// What gyre eval needs to know of a training, beside the weights.
struct WeightFacts {
    ModelSpec model;
    Normalisation normalisation;  // how pixels were normalised
    Normalisation measured;       // the data set's own
    int classes = 0;
    std::vector<std::string> class_names;  // [classes], or none
};

class CheckpointFiles {
 public:
    // Throws Error where files get in each other's way or, on rank 0, cannot be written: better
    // known before the training than after it.
    CheckpointFiles(const TrainOptions& options, bool is_root);

    // Collective. Rank 0 alone reads and writes files, so its flags count; it says where another
    // rank has one that it lacks.
    void meet(Communicator& comm);
    // After meet(), the same on all ranks.
    bool saves() const { return saves_; }
    bool resumes() const { return resumes_; }
    bool traces() const { return traces_; }
    // Whether this rank writes weights; known before meet().
    bool writes() const { return is_root_ && !options_.save.empty(); }

    // After meet(): whether --save-every asks for a checkpoint after this many steps, or epochs.
    bool due_after_steps(std::int64_t steps) const;
    bool due_after_epochs(int epochs) const;

    // Collective. The session's net and optimiser become those of --resume, which rank 0 alone
    // reads. Throws AgreedError where that cannot be.
    Cursor resume(Session& session, const Settings& settings);
    // Collective. step: of the training. last: to go on from; best: the best so far.
    void save(Session& session, const WeightFacts& facts, const Settings& settings,
              const Cursor& cursor, std::int64_t step, bool last, bool best);
    // Collective. Returns when all is on the disk.
    void finish(Communicator& comm);

 private:
    const TrainOptions& options_;
    const bool is_root_;
    bool saves_ = false, resumes_ = false, traces_ = false;
    std::unique_ptr<CheckpointWriter> writer_;  // on rank 0
};

}  // namespace gyre::train
