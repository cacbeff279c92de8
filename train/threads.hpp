// How many threads a rank works with.
#pragma once

#include "comm/communicator.hpp"
#include "train/rooms.hpp"

namespace gyre::train {

// Worker threads for this rank: as asked, or this rank's share of the processors it may run on.
int choose_threads(int asked, const Communicator& comm);

}  // namespace gyre::train
