// The launches of one training step, as a list, without a GPU: bench-kernels --step=MODEL.
#pragma once

#include <string>
#include <vector>

#include "bench/gpu_counts.hpp"
#include "bench/gpu_models.hpp"
#include "bench/kernels.hpp"

namespace gyre::bench {

// One launch with what is known of it on some GPU.
struct StepLaunch {
    emulated::LaunchProfile profile;
    const Resources* resources = nullptr;  // null: this build has none
    Occupancy occupancy;
    Bounds bounds{};  // of counts: zeros where no blocks ran
};

// What a step is computed in.
struct StepPrecision {
    bool tf32 = false;
    DataType type = DataType::float32;  // of activations; 16 bits take tf32 = true
};

// The second step of one rank with n images, as it is submitted for a GPU of this model.
// most_blocks: of a launch that run and are counted; 0: none, negative: all. The optimiser is Adam
// for `wide` and `resnet`, SGD with momentum 0.5 for others.
std::vector<StepLaunch> step_launches(const std::string& model, int n,
                                      const StepPrecision& precision, const GpuModel& gpu,
                                      const ResourceReports& reports, std::int64_t most_blocks);

// What the launches of one operation did, with the estimates.
std::string text_of_operation(const std::string& name,
                              const std::vector<emulated::LaunchProfile>& profiles,
                              const GpuModel& gpu, const ResourceReports& reports);

// Prints them, one table for each batch; with options.profile what was counted, too. Returns the
// program's exit code.
int run_step(const Options& options);

}  // namespace gyre::bench
