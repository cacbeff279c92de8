// What is to be known of a GPU to say what a launch means on it, and a model of its time.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "kernels/emulation/profiler.hpp"

namespace gyre::bench {

// From NVIDIA's white papers of the A100, H100 and H200 (SXM) and the CUDA C++ Programming Guide's
// table of technical specifications; rates that such cards were measured to reach where a comment
// says so.
struct GpuModel {
    std::string name;
    std::string architecture;  // as ptxas names it
    int multiprocessors = 0;
    double clock_ghz = 0.0;
    std::int64_t shared_bytes = 0;  // of a multiprocessor
    double dram_gbs = 0.0;          // measured, copy
    double l2_gbs = 0.0;            // measured
    double l2_bytes = 0.0;
    double tensor_flop = 0.0;  // TF32, of a multiprocessor in a cycle
    int max_blocks = 32, max_threads = 2048, registers = 65536;
};
const std::vector<GpuModel>& gpu_models();
// Throws Error(usage) naming those there are.
const GpuModel& gpu_model(const std::string& name);
// Of the device that calls itself so, such as "NVIDIA H100 80GB HBM3"; null: none of them.
const GpuModel* gpu_model_of(const std::string& device);

// Of the emulated kernel that begins at this address, with its template's arguments and without
// gyre's namespaces, such as "direct::direct_forward_kernel<5, 8>"; empty: unknown.
std::string kernel_name(const void* entry);

// What ptxas reported of kernels, for one architecture.
struct Resources {
    int registers = 0;
    std::int64_t shared_bytes = 0;  // declared
    // Of the hottest loop's machine code: instructions for each HMMA, and for each that computes or
    // accesses memory; 0: unknown.
    double per_mma = 0.0, per_useful = 0.0;
};
class ResourceReports {
 public:
    // Reads the *.resources files under a folder, and its loops.txt where there is one
    // (tests/sass_gate.py --loops). Empty: the folder `kernels` beside this program, if there are
    // any in it. Throws Error(usage) where a folder that was given has none.
    ResourceReports(const std::string& folder, const std::string& architecture);
    // Of the emulated kernel that begins at this address; null: unknown.
    const Resources* of(const void* entry) const;
    // By its name with its template's arguments, such as "direct_forward_kernel<5, 8>".
    const Resources* of_kernel(const std::string& name) const;

 private:
    std::map<std::string, Resources> kernels_;  // by name, without namespaces of their own
};

// How a launch fills a GPU.
struct Occupancy {
    int blocks = 0;      // of a multiprocessor at a time
    double warps = 0.0;  // share of the most it can have
    double waves = 0.0;  // blocks of the grid over those that run at a time
};
Occupancy occupancy(const GpuModel& gpu, const emulated::emulator::Launch& launch,
                    const Resources* resources);

// What bounds the time of a launch, each by itself, in microseconds: instructions to issue,
// wavefronts of shared memory, tensor cores, the chain of dependent latencies of a block for each
// round of blocks, memory (DRAM, or L2 where all of it fits), traffic between L2 and
// multiprocessors.
enum class Bound { issue, shared, tensor, latency, memory, l2 };
constexpr std::size_t kBounds = 6;
const char* name_of(Bound bound);
using Bounds = std::array<double, kBounds>;
Bounds bounds_of(const GpuModel& gpu, const emulated::LaunchProfile& profile,
                 const Resources* resources);

// The time of launches in a captured graph, by arithmetic: for each a gap, and the largest of its
// bounds, each times a factor. Never a measurement.
struct TimeModel {
    double gap_us = 1.3;
    Bounds factors = {1, 1, 1, 1, 1, 1};

    double us(const Bounds& launch) const;
    double us(const std::vector<Bounds>& launches) const;
    Bound largest(const Bounds& launch) const;
};

// Launches that were timed.
struct TimedLaunches {
    std::vector<Bounds> launches;
    double measured_us = 0.0;
};
// The model that is closest to every second of them, and its errors: the median of |estimate /
// measured - 1|.
struct FittedModel {
    TimeModel model;
    double error_before = 0.0;  // of the unfitted model, over all
    double error_fitted = 0.0;  // over those that it was fitted to,
    double error_others = 0.0;  // and over the others
};
FittedModel fit(const std::vector<TimedLaunches>& timed);

}  // namespace gyre::bench
