// A training's lines, or its progress bar, on standard output.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/clock.hpp"
#include "train/cli/terminal.hpp"
#include "train/fit.hpp"

namespace gyre::train {

// Rank 0 prints.
class ProgressReport final : public FitObserver {
 public:
    // run must outlive the object.
    ProgressReport(const RunSpec& run, bool is_root);

    void on_start(const Training& training) override;
    void on_step(const Training& training, const StepResult& done) override;
    void on_evaluation(const Training& training, const EvaluatedSet& set, std::int64_t done,
                       std::int64_t images) override;
    void on_epoch(const Training& training, const EpochFacts& epoch) override;
    void on_end(const Training& training, Ending ending) override;

 private:
    void say(const std::vector<std::string>& items, const std::string& separator = "  ") const;
    void draw_bar(const Training& training, Progress progress);
    double seconds_left(const Training& training) const;

    const RunSpec& run_;
    const bool is_root_;
    int columns_;  // of the terminal that is watched; 0: none
    Cursor begin_;
    Clock::time_point run_start_, bar_drawn_;
    double done_seconds_ = 0.0;                          // of finished epochs
    double evaluation_seconds_ = 0.0;                    // of these, of their evaluations
    int evaluations_ = 0;                                // that these are of
    std::optional<Clock::time_point> evaluation_begin_;  // of the one under way
};

}  // namespace gyre::train
