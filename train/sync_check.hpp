// Whether all ranks still have the same parameters, as they must after every step.
#pragma once

#include "comm/communicator.hpp"
#include "model/net.hpp"
#include "train/rooms.hpp"

namespace gyre::train {

// Collective. Compares a hash of each parameter with rank 0's; throws AgreedError(communication)
// naming the first parameter that differs and the ranks where it does. Copies all parameters to the
// host.
void require_same_parameters(Communicator& comm, const Net& net, const std::string& when);

}  // namespace gyre::train
