// Collectives of the ranks of one host through memory that they share.
//
// Each rank copies what it contributes into its slots; of a sum it adds up its slice, straight from
// the others' slots, and all copy the result out. Sums are added in the tree over the
// ranks (base/sum_tree.hpp), so their bits do not depend on who is early.
#pragma once

#include <memory>

#include "comm/communicator.hpp"

namespace gyre::comm {

// Collective. Wraps a communicator whose ranks are all on this host, and leaves to it what is not a
// start(); returns `inner` itself, on all ranks, if they are not, or cannot share memory, or one of
// them does not want it. seconds: a wait that takes longer throws Error(communication).
std::unique_ptr<Communicator> share_memory(std::unique_ptr<Communicator> inner, bool wanted,
                                           double seconds);

}  // namespace gyre::comm
