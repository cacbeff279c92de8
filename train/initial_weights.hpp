// The weights that a training begins with.
#pragma once

#include <string>
#include <vector>

#include "model/net.hpp"
#include "train/images.hpp"
#include "train/rooms.hpp"
#include "train/run_spec.hpp"

namespace gyre::train {

// Gives the net what run.net says: weights that are drawn from the seed and scaled, whitening
// filters, or what a file has. images: of the training. Returns remarks on the file for the user.
// Throws Error(usage) for `init-scale` of no parameter and `whiten` of a layer that has no such
// filters; Error(bad_input) for the file.
std::vector<std::string> initialise(Net& net, const DeviceImages& images, const RunSpec& run);

}  // namespace gyre::train
