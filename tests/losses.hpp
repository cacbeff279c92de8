// Comparing the losses of trainings that must be the same but for rounding.
#pragma once

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <limits>

#include "tests/gyre_process.hpp"

namespace gyre::test {

// tests/smooth.model: a net in which rounding does not grow, for all that does not depend on the
// net.
inline const std::string kSmoothNet = " --model " GYRE_SMOOTH_MODEL " ";

// Greatest difference of the losses of such nets whose sums have another order. Measured, with AVX2
// and AVX-512: 2.4e-7, about the losses' own last bits, after 50 steps on 1 to 4 ranks.
constexpr double kSameLosses = 8 * FLT_EPSILON;

// The losses of all steps in a file of --json with --log-interval 1.
inline std::vector<double> step_losses(const std::filesystem::path& json) {
    std::vector<double> values;
    for (const auto& event : read_events(json, "step")) {
        values.push_back(event.at("loss").is_null() ? NAN : event.at("loss").get<double>());
    }
    return values;
}

// The greatest difference of two series of losses, relative to those above 1: a smaller loss still
// has the rounding of logits above 1. Infinite for other numbers of steps, none, or a NaN.
inline double largest_difference(const std::vector<double>& a, const std::vector<double>& b) {
    double worst =
        a.size() == b.size() && !a.empty() ? 0.0 : std::numeric_limits<double>::infinity();
    for (std::size_t i = 0; i < std::min(a.size(), b.size()); ++i) {
        const double difference = std::abs(a[i] - b[i]) / std::max(1.0, std::abs(b[i]));
        worst = difference <= worst ? worst : std::isnan(difference) ? INFINITY : difference;
    }
    return worst;
}

// The least result of difference(seed) over a few seeds, asking no more once it is within `bound`.
// For nets with ReLU or pooling on different kernels: a flipped choice spoils single seeds, an
// error in the arithmetic all of them.
template <class Difference>
double least_difference(double bound, Difference difference) {
    double least = INFINITY;
    for (int seed = 1; seed <= 4 && !(least <= bound); ++seed) {
        least = std::min(least, difference(seed));
    }
    return least;
}

}  // namespace gyre::test
