#include "bench/gpu_estimates.hpp"

#include <fmt/format.h>

#if defined(GYRE_HAVE_PROFILER)
#include "bench/gpu_step.hpp"

namespace gyre::bench {

struct Estimates::State {
    State(const Options& options_, const std::string& device)
        : options(options_),
          gpu(options.profile ? &gpu_model(options.gpu) : gpu_model_of(device)),
          reports(gpu == nullptr ? "" : options.resources,
                  gpu == nullptr ? "" : gpu->architecture) {}

    std::vector<simt::LaunchProfile> count(const Row& row) const {
        return counts_of(row.net, row.layer, row.direction, row.n == 0 ? 1 : row.n, options.tf32,
                         gpu->multiprocessors);
    }

    const Options options;
    const GpuModel* const gpu;
    const ResourceReports reports;
    std::string profiles;
    std::vector<TimedLaunches> timed;
};

Estimates::Estimates(const Options& options, const std::string& device)
    : state_(std::make_unique<State>(options, device)) {}
Estimates::~Estimates() = default;

void Estimates::add_counts(const Row& row) {
    state_->profiles +=
        text_of_operation(row.name(), state_->count(row), *state_->gpu, state_->reports);
}

double Estimates::estimate_us(const Row& row) {
    if (state_->gpu == nullptr) {
        return 0.0;
    }
    TimedLaunches timed{.launches = {}, .measured_us = row.ours_us};
    for (const simt::LaunchProfile& profile : state_->count(row)) {
        timed.launches.push_back(
            bounds_of(*state_->gpu, profile, state_->reports.of(profile.launch.entry)));
    }
    const double us = TimeModel().us(timed.launches);
    state_->timed.push_back(std::move(timed));
    return us;
}

std::string Estimates::text() const {
    if (state_->timed.empty()) {
        return state_->profiles;
    }
    const FittedModel fitted = fit(state_->timed);
    std::string text = fmt::format(
        "\nestimates: median error {:.0f} % of {} times; with constants fitted to every second, "
        "{:.0f} % over these and {:.0f} % over the others: gap {:.2f} us",
        100.0 * fitted.error_before, state_->timed.size(), 100.0 * fitted.error_fitted,
        100.0 * fitted.error_others, fitted.model.gap_us);
    for (std::size_t i = 0; i < kBounds; ++i) {
        text +=
            fmt::format(", {} x {:.2f}", name_of(static_cast<Bound>(i)), fitted.model.factors[i]);
    }
    return text + "\n";
}

}  // namespace gyre::bench

#else

namespace gyre::bench {

struct Estimates::State {};
Estimates::Estimates(const Options&, const std::string&) {}
Estimates::~Estimates() = default;
void Estimates::add_counts(const Row&) {}
double Estimates::estimate_us(const Row&) {
    return 0.0;
}
std::string Estimates::text() const {
    return {};
}

}  // namespace gyre::bench

#endif
