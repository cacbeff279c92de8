// SGD, Adam and AdamW with PyTorch's update rules, over the flat parameter buffer of a net.
#pragma once

#include "model/net.hpp"
#include "train/options.hpp"

namespace gyre {

class Optimizer {
 public:
    // Throws Error(usage) for options that make no sense.
    Optimizer(Backend& backend, Net& net, const TrainOptions& options);
    // Updates all parameters from the (reduced) gradients, which it may clip.
    void step();

 private:
    enum class Rule { sgd, adam } rule_;
    Backend& backend_;
    Net& net_;
    const std::optional<float> max_grad_norm_;
    SgdArgs sgd_;
    AdamArgs adam_;
    DeviceBuffer<float> first_, second_;  // velocity; or the moments m and v
};

}  // namespace gyre
