// Which parameters are trained, and at which rate: the settings `freeze` and `lr-scale`.
#pragma once

#include <cstdint>
#include <vector>

#include "model/net.hpp"
#include "train/optimizer_spec.hpp"
#include "train/rooms.hpp"

namespace gyre::train {

// A parameter's elements in the flat buffer, with their padding.
struct Trained {
    std::int64_t begin, end;
    float lr_scale;
};
// All that no pattern freezes, ascending. Throws Error(usage) if a pattern is malformed or matches
// no parameter, or if none is left to train.
std::vector<Trained> trained(const Net& net, const OptimizerSpec& spec);

}  // namespace gyre::train
