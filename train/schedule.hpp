// Learning rates that follow the steps of a training, by the formulas of torch.optim.lr_scheduler.
//
// A schedule is evaluated for every step of the optimiser, as if scheduler.step() followed every
// optimizer.step(): all its lengths are in steps.
#pragma once

#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace gyre::train {

enum class ScheduleKind { constant, step, cosine, one_cycle, plateau };
inline const std::vector<std::pair<std::string, ScheduleKind>> kScheduleKinds = {
    {"constant", ScheduleKind::constant},
    {"step", ScheduleKind::step},
    {"cosine", ScheduleKind::cosine},
    {"one-cycle", ScheduleKind::one_cycle},
    {"plateau", ScheduleKind::plateau}};

// With the rate r, and t steps after the warm-up:
//   constant   r
//   step       r * gamma^floor(t / step_size)                                           StepLR
//   cosine     min_rate + (r - min_rate) (1 + cos(pi t / T)) / 2, T: all steps after the warm-up;
//              min_rate from then on                                         CosineAnnealingLR
//   one_cycle  from r / 25 up to r in the first 30 % of total_steps, then down to r / 250000, both
//              along half a cosine            OneCycleLR's defaults, without cycling momentum
//   plateau    r * gamma^falls, at least min_rate; Plateau counts the falls       ReduceLROnPlateau
// During the warm-up of W steps, at step t: r (f + (1 - f) t / W), f = 0.01      LinearLR
struct ScheduleSpec {
    ScheduleKind kind = ScheduleKind::constant;
    std::int64_t warmup_steps = 0;               // one_cycle: none, as it has its own
    std::int64_t total_steps = 0;                // of the training: for cosine and one_cycle
    std::optional<std::int64_t> step_size = {};  // step's
    // The same in epochs, if that is how they are given: in_steps() writes them above.
    std::optional<int> warmup_epochs = {}, step_epochs = {};
    std::optional<double> gamma = {};     // step's and plateau's; 0.1
    std::optional<double> min_rate = {};  // cosine's and plateau's; 0
    std::optional<int> patience = {};     // plateau's: evaluations that a fall waits for; 10
};
// Throws Error(usage) for what does not go together. The lengths must be in steps.
void check(const ScheduleSpec& spec);

// The same schedule with all its lengths in steps, in a training of so many epochs.
ScheduleSpec in_steps(ScheduleSpec spec, int epochs, std::int64_t epoch_steps);

// The state of schedule plateau: torch.optim.lr_scheduler.ReduceLROnPlateau with its defaults but
// for factor, patience and min_lr. The values are float32s, so that files keep them as they are.
struct Plateau {
    float best =
        std::numeric_limits<float>::max();  // loss; a better one is below (1 - 1e-4) * best
    int num_bad_epochs = 0;                 // since the best loss, or the last fall
    int falls = 0;

    void evaluated(const ScheduleSpec& spec, double loss);
};

// The rate of a step, from 0; `rate` is that of a constant schedule. falls: plateau's.
double scheduled_rate(const ScheduleSpec& spec, double rate, std::int64_t step, int falls = 0);

}  // namespace gyre::train
