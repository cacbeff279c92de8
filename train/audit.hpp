// Looks for ranks that miscalculate: every few steps a second rank computes one leaf of the step's
// gradients, too, and the two must have the same bits.
#pragma once

#include <cstdint>

#include "train/fit.hpp"
#include "train/rooms.hpp"
#include "train/trainer.hpp"

namespace gyre::train {

// All functions are collective. With one rank that rank computes a leaf twice.
class Audit final : public FitObserver {
 public:
    // every: steps between two audits, more than 0. warns: a difference is told on standard error
    // instead of thrown.
    Audit(std::int64_t every, bool warns) : every_(every), warns_(warns) {}

    void on_launch(const Training& training, std::int64_t number) override;
    bool pauses_after(std::int64_t steps) override;
    // Throws AgreedError(differs), naming step, leaf, and both ranks with their hosts.
    void on_pause(const Training& training) override;

 private:
    const std::int64_t every_;
    const bool warns_;
    bool due_ = false;
    std::int64_t audited_ = 0;  // the step
    StepAudit step_;
};

}  // namespace gyre::train
