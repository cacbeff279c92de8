// The checkpoints of a training: written to a folder during the training, and read to resume it.
// Only rank 0 reads and writes files.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/clock.hpp"
#include "data/dataset.hpp"
#include "train/checkpoint.hpp"
#include "train/fit.hpp"
#include "train/rooms.hpp"

namespace gyre::train {

// Facts about a training that an evaluation needs besides the weights.
struct WeightFacts {
    ModelSpec model = {};
    Normalisation normalisation = {};  // how pixels were normalised
    Normalisation measured = {};       // the data set's own
    std::string resize = {};           // `resize`, if it was given
    int classes = 0;
    std::vector<std::string> class_names = {};  // [classes], or none
};

// Returns where the training resumes if the settings say `auto`: the folder of `save`, if rank 0
// finds a checkpoint there, else nowhere. Throws Error(usage) if rank 0 has no such folder.
std::string resolve_resume(const CheckpointSpec& spec, bool is_root);

class CheckpointFiles final : public FitObserver {
 public:
    // Throws Error on rank 0 if its folder cannot be written, or has another training's
    // checkpoints: better known before the training than after it. Everything given must outlive
    // the object; facts and identity may be completed until the training starts.
    CheckpointFiles(const RunSpec& run, const WeightFacts& facts, const Identity& identity,
                    bool is_root);

    // saves: whether rank 0 writes checkpoints, if its settings may differ from this rank's.
    void set_saves(bool saves) { saves_ = saves; }
    // Returns whether this rank writes checkpoints.
    bool writes() const { return writer_ != nullptr; }

    // Collective. Returns the virtual ranks of the checkpoint at run.checkpoints.resume, which rank
    // 0 reads. Throws AgreedError if there is none.
    int virtual_ranks(Communicator& comm);
    // Collective. The session's net and optimizer become those of the checkpoint at
    // run.checkpoints.resume, which rank 0 reads; returns where its training resumes. Throws
    // AgreedError if that cannot be.
    Cursor resume(Session& session);
    // Collective, called before resume(). Returns the weights of the best epoch, which rank 0 reads
    // from the folder at run.checkpoints.resume; nothing if it has none. The net has them then.
    std::optional<KeptNet> best(Session& session) const;

    // Collective, as all of them.
    bool pauses_after(std::int64_t steps) override;
    bool wants_save() override;  // not collective
    void on_pause(const Training& training) override;
    void on_epoch(const Training& training, const EpochFacts& epoch) override;
    // Returns when all is on the disk.
    void on_end(const Training& training, Ending ending) override;

 private:
    // last: a checkpoint from which the training resumes; best: the best so far.
    void save(const Training& training, bool last, bool best);

    const CheckpointSpec& spec_;
    const StopSpec& stop_;
    const WeightFacts& facts_;
    const Identity& identity_;
    const bool is_root_;
    bool saves_;
    bool due_ = false;
    Clock::time_point timed_ = Clock::now();  // when the last checkpoint was due by the clock
    std::optional<Checkpoint> read_;  // on rank 0: from which the training resumes, until it has
    std::unique_ptr<CheckpointWriter> writer_;  // on rank 0
};

}  // namespace gyre::train
