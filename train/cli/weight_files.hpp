// The files that gyre train writes on rank 0: --save, --save-last.
#pragma once

#include "comm/communicator.hpp"
#include "data/dataset.hpp"
#include "model/net.hpp"
#include "train/cli/options.hpp"

namespace gyre::train {

// What gyre eval needs to know of a training, beside the weights.
struct WeightFacts {
    ModelSpec model;
    Normalisation normalisation;  // how pixels were normalised
    Normalisation measured;       // the data set's own
    int classes = 0;
};

class WeightFiles {
 public:
    // Throws Error where files get in each other's way or, on rank 0, cannot be written: better
    // known before the training than after it.
    WeightFiles(const TrainOptions& options, bool is_root);

    // Collective. Rank 0 alone reads and writes files, so its flags count; it says where another
    // rank has one that it lacks.
    void meet(Communicator& comm);
    // Whether this rank writes weights.
    bool writes() const {
        return is_root_ && !(options_.save.empty() && options_.save_last.empty());
    }
    // Collective. At the end of an epoch; better: than all before it. Returns whether the best
    // weights were saved.
    bool save(Communicator& comm, const Net& net, const WeightFacts& facts, bool better) const;

 private:
    const TrainOptions& options_;
    const bool is_root_;
    bool any_ = false;  // some rank has --save or --save-last
};

}  // namespace gyre::train
