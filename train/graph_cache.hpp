// Launches of whole batches as graphs of the device: captured once, then launched again and again.
#pragma once

#include <cstdint>
#include <vector>

#include "base/function_ref.hpp"
#include "comm/communicator.hpp"
#include "comm/reducer.hpp"
#include "train/rooms.hpp"

namespace gyre::train {

class GraphCache {
 public:
    // Steps that run call by call before one is captured: libraries and drivers load and allocate
    // at first use.
    static constexpr int kWarmUps = 2;

    // slots: the launch queue's. Each has graphs of its own, as a graph's events are read before it
    // is launched again. max_steps: of a graph. All ranks must be given the same values.
    GraphCache(Communicator& comm, bool enabled, std::size_t slots, int max_steps)
        : comm_(comm), enabled_(enabled), max_steps_(max_steps), single_(slots), several_(slots) {}

    // Returns whether whole batches are, or will be, launched as graphs.
    bool enabled() const { return enabled_; }
    int max_steps() const { return max_steps_; }

    // The graph for the next launch; null: its step is to be submitted call by call. batches: whole
    // ones that the epoch still has, the next one included. Collective if the graph is not there
    // yet: capture(steps) then makes it. If that fails on some rank, graphs are disabled on all of
    // them, with a warning; throws Error(communication) as it is, since the communicator is of no
    // use any more.
    const Reducer::Captured* get(std::size_t slot, std::int64_t batches,
                                 FunctionRef<Reducer::Captured(int steps)> capture);

 private:
    Communicator& comm_;
    bool enabled_;
    const int max_steps_;
    int warm_ups_ = 0;  // so far
    // Graphs of one step and of max_steps_, [slots]. They stay if graphs are disabled, as events of
    // those that were launched are still to be read.
    std::vector<Reducer::Captured> single_, several_;
};

}  // namespace gyre::train
