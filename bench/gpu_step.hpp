// Lists the launches of one training step without a GPU: bench-kernels --step=MODEL.
#pragma once

#include <string>
#include <vector>

#include "bench/gpu_counts.hpp"
#include "bench/gpu_models.hpp"
#include "bench/kernels.hpp"
#include "model/net_spec.hpp"

namespace gyre::bench {

// One launch and its properties on some GPU.
struct StepLaunch {
    simt::LaunchProfile profile;
    const Resources* resources = nullptr;  // null: this build has none
    Occupancy occupancy;
    Bounds bounds{};  // from counts; zeros if no blocks ran
};

// A step of one rank in a graph of several.
struct StepWork {
    std::vector<StepLaunch> launches;
    std::int64_t copies = 0;  // within the device's memory; they are nodes of the graph, too

    double us(const TimeModel& time) const;
};

// Returns a step with n images as it is submitted on this GPU model. most_blocks: the most blocks
// of a launch that run and are counted; 0: none, negative: all. The optimiser is Adam for `wide`
// and `resnet`, SGD with momentum 0.5 for others.
StepWork step_work(const std::string& model, int n, model::Precision precision, const GpuModel& gpu,
                   const ResourceReports& reports, std::int64_t most_blocks);

// Describes the launches of one operation, with the estimates.
std::string text_of_operation(const std::string& name,
                              const std::vector<simt::LaunchProfile>& profiles, const GpuModel& gpu,
                              const ResourceReports& reports);

// Prints the launches, one table for each batch, and with options.profile the counts. Returns the
// program's exit code.
int run_step(const Options& options);

}  // namespace gyre::bench
