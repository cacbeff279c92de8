#include "train/schedule.hpp"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "base/error.hpp"

namespace gyre::train {
namespace {

// From begin, at part 0, to end, at part 1, along half a cosine.
double anneal(double begin, double end, double part) {
    return end + (begin - end) * (1.0 + std::cos(std::numbers::pi * part)) / 2.0;
}

double one_cycle(double highest, double step, double total_steps) {
    constexpr double kRising = 0.3, kFirst = 25.0, kLast = 1e4;
    const double first = highest / kFirst, last = first / kLast;
    const double turn = kRising * total_steps - 1.0, end = total_steps - 1.0;
    return step <= turn ? anneal(first, highest, step / turn)
                        : anneal(highest, last, std::min(1.0, (step - turn) / (end - turn)));
}

}  // namespace

void check(const ScheduleSpec& spec) {
    const bool steps = spec.kind == ScheduleKind::step, cosine = spec.kind == ScheduleKind::cosine,
               one_cycle = spec.kind == ScheduleKind::one_cycle,
               plateau = spec.kind == ScheduleKind::plateau;
    if (steps && !spec.step_size) {
        throw usage_error("`schedule` step needs `step_size`, after which the rate falls");
    }
    if (spec.step_size && *spec.step_size < 1) {
        throw usage_error("`step_size` must be at least 1");
    }
    if (!steps && spec.step_size) {
        throw usage_error("`step_size` is for `schedule` step");
    }
    if (!steps && !plateau && spec.gamma) {
        throw usage_error("`gamma` is for `schedule` step and plateau");
    }
    if (!cosine && !plateau && spec.min_rate) {
        throw usage_error("`min_rate` is for `schedule` cosine and plateau");
    }
    if (!plateau && spec.patience) {
        throw usage_error("`lr-patience` is for `schedule` plateau");
    }
    if (one_cycle && spec.warmup_steps > 0) {
        throw usage_error(
            "`schedule` one-cycle has its own warm-up: it goes without "
            "`warmup_steps`");
    }
    if ((cosine || one_cycle) && spec.total_steps < 1) {
        throw usage_error("`schedule` cosine and one-cycle need `total_steps`");
    }
}

ScheduleSpec in_steps(ScheduleSpec spec, int epochs, std::int64_t epoch_steps) {
    if (spec.warmup_epochs) {
        spec.warmup_steps = *spec.warmup_epochs * epoch_steps;
    }
    if (spec.step_epochs) {
        spec.step_size = *spec.step_epochs * epoch_steps;
    }
    if (spec.total_steps == 0) {
        spec.total_steps = epochs * epoch_steps;
    }
    return spec;
}

void Plateau::evaluated(const ScheduleSpec& spec, double loss) {
    constexpr int kPatience = 10;
    constexpr double kThreshold = 1e-4;
    if (loss < double{best} * (1.0 - kThreshold)) {
        best = static_cast<float>(loss);
        num_bad_epochs = 0;
    } else if (++num_bad_epochs > spec.patience.value_or(kPatience)) {
        num_bad_epochs = 0;
        ++falls;
    }
}

double scheduled_rate(const ScheduleSpec& spec, double rate, std::int64_t step, int falls) {
    constexpr double kWarmUpFrom = 0.01;
    if (falls > 0) {
        rate = std::max(rate * std::pow(spec.gamma.value_or(0.1), falls),
                        std::min(rate, spec.min_rate.value_or(0.0)));
    }
    if (step < spec.warmup_steps) {
        const double part = static_cast<double>(step) / static_cast<double>(spec.warmup_steps);
        return rate * (kWarmUpFrom + (1.0 - kWarmUpFrom) * part);
    }
    const auto after = static_cast<double>(step - spec.warmup_steps);
    switch (spec.kind) {
        case ScheduleKind::constant:
        case ScheduleKind::plateau:
            break;
        case ScheduleKind::step:
            return rate * std::pow(spec.gamma.value_or(0.1),
                                   std::floor(after / static_cast<double>(*spec.step_size)));
        case ScheduleKind::cosine: {
            const auto all = static_cast<double>(spec.total_steps - spec.warmup_steps);
            return anneal(rate, spec.min_rate.value_or(0.0), after < all ? after / all : 1.0);
        }
        case ScheduleKind::one_cycle:
            return one_cycle(rate, after, static_cast<double>(spec.total_steps));
    }
    return rate;
}

}  // namespace gyre::train
