#include "train/graph_cache.hpp"

#include <fmt/format.h>

#include <cstdio>

#include "base/error.hpp"

namespace gyre::train {

const Reducer::Captured* GraphCache::get(std::size_t slot, std::int64_t batches,
                                         FunctionRef<Reducer::Captured(int steps)> capture) {
    if (!enabled_) {
        return nullptr;
    }
    if (warm_ups_ < kWarmUps) {
        ++warm_ups_;
        return nullptr;
    }
    const int steps = batches >= max_steps_ ? max_steps_ : 1;
    Reducer::Captured& graph = (steps > 1 ? several_ : single_)[slot];
    if (graph.graph == nullptr) {
        try {
            // If one rank launched a graph and another did not, their reductions might not meet.
            agree(comm_, [&] { graph = capture(steps); });
        } catch (const Error& error) {
            if (error.code() == ExitCode::communication) {
                throw;
            }
            enabled_ = false;
            if (comm_.is_root()) {
                fmt::print(stderr,
                           "gyre: the step runs without a CUDA graph, as it could not be captured: "
                           "{}\n",
                           error.what());
            }
            return nullptr;
        }
    }
    return &graph;
}

}  // namespace gyre::train
