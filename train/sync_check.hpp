// A check that all ranks still have the same parameters, as they must after every step.
#pragma once

#include "comm/communicator.hpp"
#include "model/net.hpp"
#include "train/fit.hpp"
#include "train/rooms.hpp"

namespace gyre::train {

// Collective. Compares a hash of each parameter with rank 0's; throws AgreedError(communication)
// naming the first parameter that differs and the ranks where it does. Copies all parameters to the
// host.
void require_same_parameters(Communicator& comm, const Net& net, const std::string& when);

// The same after every so many steps of a training. Collective.
class SyncCheck final : public FitObserver {
 public:
    explicit SyncCheck(std::int64_t every) : every_(every) {}
    bool pauses_after(std::int64_t steps) override {
        due_ = due_ || steps % every_ == 0;
        return due_;
    }
    void on_pause(const Training& training) override;

 private:
    const std::int64_t every_;
    bool due_ = false;
};

}  // namespace gyre::train
