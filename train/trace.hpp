// A timeline of a few steps of all ranks, as a file that ui.perfetto.dev and chrome://tracing show.
#pragma once

#include <cstdint>
#include <fstream>
#include <optional>
#include <string>

#include "kernels/device/timeline.hpp"
#include "train/fit.hpp"
#include "train/rooms.hpp"

namespace gyre::train {

// Records the steps run.reports.trace_steps, and writes the file at the end of the training.
// Collective: all ranks' timelines begin together, and rank 0 gathers and writes them.
class Trace final : public FitObserver {
 public:
    // Throws Error(bad_input) if the file cannot be written. reports must outlive the object.
    Trace(const ReportSpec& reports, bool is_root);

    void on_launch(const Training& training, std::int64_t number) override;
    void on_end(const Training& training, Ending ending) override;
    // Returns whether the training got as far as the first of the steps; otherwise the file is
    // empty.
    bool has_begun() const { return timeline_.has_value(); }

 private:
    // Rank 0 gets the trace of all ranks, in Chrome's format (JSON), the others an empty text.
    std::string gather(Communicator& comm) const;

    const ReportSpec& reports_;
    std::ofstream file_;                // on rank 0
    std::optional<Timeline> timeline_;  // since the first of the steps
};

}  // namespace gyre::train
