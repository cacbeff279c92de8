// A copy of what a net has learnt, in the host's memory.
#pragma once

#include <vector>

#include "model/net.hpp"
#include "train/rooms.hpp"

namespace gyre::train {

// Keeps what steps change and the next step builds on: the parameters and this rank's state. Put
// back with zeros in the gradient buffer, of which no kernel writes the padding and the StepStats.
class KeptNet {
 public:
    KeptNet(Backend& backend, Net& net)
        : backend_(&backend),
          net_(&net),
          parameters_(static_cast<std::size_t>(net.flat_elems())),
          state_(static_cast<std::size_t>(net.state_elems())) {
        backend.download(parameters_.data(), net.parameter_data(), bytes(parameters_));
        if (!state_.empty()) {
            backend.download(state_.data(), net.state_data(), bytes(state_));
        }
    }
    void put_back() {
        backend_->upload(net_->parameter_data(), parameters_.data(), bytes(parameters_));
        if (!state_.empty()) {
            backend_->upload(net_->state_data(), state_.data(), bytes(state_));
        }
        backend_->fill_zero(net_->gradient_data(),
                            static_cast<std::size_t>(net_->gradient_elems()) * sizeof(float));
    }

 private:
    static std::size_t bytes(const std::vector<float>& values) {
        return values.size() * sizeof(float);
    }

    Backend* backend_;
    Net* net_;
    std::vector<float> parameters_, state_;  // with their padding
};

}  // namespace gyre::train
