// A timeline of a few steps of all ranks, as a file that ui.perfetto.dev and chrome://tracing show.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "kernels/device/timeline.hpp"
#include "train/session.hpp"

namespace gyre::train {

// Steps of a training, counted from 1 over all epochs.
struct TraceSteps {
    std::int64_t first = 11, last = 14;
};

class Trace {
 public:
    Trace(Session& session, const TraceSteps& steps)
        : session_(session), steps_(steps), timeline_(session.backend()) {}
    // Before the trainer is asked for a step that is not submitted yet. Collective, at the first of
    // the steps: all ranks' timelines begin together.
    void before_step(std::int64_t number);
    // Collective, after the last step of the training: rank 0 gets the trace of all ranks, in
    // Chrome's format (JSON), the others an empty text. Empty, too, where the training ended before
    // the first of the steps.
    std::string gather();

 private:
    Session& session_;
    const TraceSteps steps_;
    Timeline timeline_;
    bool begun_ = false;
};

}  // namespace gyre::train
