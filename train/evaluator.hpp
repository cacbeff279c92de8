// Loss and accuracy over a whole set of images, each counted exactly once over all ranks.
#pragma once

#include <functional>
#include <vector>

#include "comm/communicator.hpp"
#include "model/net.hpp"
#include "train/images.hpp"
#include "train/rooms.hpp"
#include "train/run_spec.hpp"

namespace gyre::train {

struct Evaluation {
    double loss = 0.0;      // mean
    double accuracy = 0.0;  // in [0, 1]
    std::int64_t correct = 0, images = 0;
    bool stop = false;  // some rank was asked to stop; the figures are incomplete
};

// shards: what the set is cut into, as a step of a training (Sharding), so that the figures do not
// depend on the number of ranks; 0: each rank has its share.
// The most images in a pass of any rank, at most `most`; and those of this rank's passes, as
// Sharding::sizes() has them.
int evaluation_batch(const Communicator& comm, std::int64_t images, int most, int shards = 0);
std::vector<int> evaluation_sizes(const Communicator& comm, std::int64_t images, int batch,
                                  int shards = 0);

// Looks at a pass: the logits [n][classes] of the images [first, first + n) of the set.
using Look = std::function<void(std::int64_t first, int n, const std::vector<float>& logits)>;

// Called after each pass with the number of this rank's images that are done. Ranks differ in their
// passes.
using TellDone = std::function<void(std::int64_t done, std::int64_t images)>;

struct EvaluationPasses {
    int batch;  // images per pass, at most what the net was made for
    int shards = 0;
    Views views = Views::plain;
};

// Collective.
Evaluation evaluate(Communicator& comm, Backend& backend, Net& net, const DeviceImages& images,
                    const EvaluationPasses& passes, const Look& look = {},
                    const TellDone& tell = {});

}  // namespace gyre::train
