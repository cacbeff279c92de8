// Loss and accuracy over a whole set of images, each counted exactly once over all ranks.
#pragma once

#include "comm/communicator.hpp"
#include "model/net.hpp"
#include "train/images.hpp"
#include "train/rooms.hpp"

namespace gyre::train {

struct Evaluation {
    double loss = 0.0;      // mean
    double accuracy = 0.0;  // in [0, 1]
    std::int64_t correct = 0, images = 0;
    bool stop = false;  // some rank was asked to stop; the figures are incomplete
};

// The most images in a pass of any rank, at most `most`; and those of this rank's passes, as
// Sharding::sizes() has them.
int evaluation_batch(const Communicator& comm, std::int64_t images, int most);
std::vector<int> evaluation_sizes(const Communicator& comm, std::int64_t images, int batch);

// Collective. batch: images per pass, at most what the net was made for.
Evaluation evaluate(Communicator& comm, Backend& backend, Net& net, const DeviceImages& images,
                    int batch);

}  // namespace gyre::train
