// The properties of a GPU that determine what a launch means on it, and a model of its time.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "kernels/emulation/profiler.hpp"

namespace gyre::bench {

// Values from NVIDIA's white papers on the A100, H100 and H200 (SXM) and the CUDA C++ Programming
// Guide's table of technical specifications; where a comment says "measured", the rate is one that
// such cards reached.
struct GpuModel {
    std::string name;
    std::string architecture;  // as ptxas names it
    int multiprocessors = 0;
    double clock_ghz = 0.0;
    std::int64_t shared_bytes = 0;  // per multiprocessor
    double dram_gbs = 0.0;          // measured, copy
    double l2_gbs = 0.0;            // measured
    double l2_bytes = 0.0;
    double tensor_flop = 0.0;  // TF32, per multiprocessor and cycle
    int max_blocks = 32, max_threads = 2048, registers = 65536;
};
const std::vector<GpuModel>& gpu_models();
// Throws Error(usage), which lists the known names.
const GpuModel& gpu_model(const std::string& name);
// Returns the model of a device by its full name, such as "NVIDIA H100 80GB HBM3"; null if unknown.
const GpuModel* gpu_model_of(const std::string& device);

// Returns the name of the emulated kernel that begins at this address, with its template's
// arguments and without gyre's namespaces, such as "direct::direct_forward_kernel<5, 8>"; empty if
// unknown.
std::string kernel_name(const void* entry);

// A kernel's resources as ptxas reported them, for one architecture.
struct Resources {
    int registers = 0;
    std::int64_t shared_bytes = 0;  // declared
    // In the hottest loop's machine code: instructions per HMMA, and per instruction that computes
    // or accesses memory; 0 if unknown.
    double per_mma = 0.0, per_useful = 0.0;
};
class ResourceReports {
 public:
    // Reads the *.resources files under a folder, and its loops.txt if it has one
    // (tests/kernels/sass_gate.py --loops). If `folder` is empty, reads the folder `kernels` next
    // to this program, if it has any. Throws Error(usage) if a given folder has none.
    ResourceReports(const std::string& folder, const std::string& architecture);
    // Finds the emulated kernel that begins at this address; null if unknown.
    const Resources* of(const void* entry) const;
    // Finds a kernel by its name with template arguments, such as "direct_forward_kernel<5, 8>".
    const Resources* of_kernel(const std::string& name) const;

 private:
    std::map<std::string, Resources> kernels_;  // by name without namespaces
};

// How a launch fills a GPU.
struct Occupancy {
    int blocks = 0;      // per multiprocessor at a time
    double warps = 0.0;  // share of the maximum
    double waves = 0.0;  // blocks of the grid / blocks that run at a time
};
Occupancy occupancy(const GpuModel& gpu, const simt::emulator::Launch& launch,
                    const Resources* resources);

// The separate bounds on the time of a launch, in microseconds: instructions to issue, wavefronts
// of shared memory, tensor cores, the chain of dependent latencies of a block for each round of
// blocks, memory (DRAM, or L2 if all of it fits), and traffic between L2 and multiprocessors.
enum class Bound { issue, shared, tensor, latency, memory, l2 };
constexpr std::size_t kBounds = 6;
const char* name_of(Bound bound);
using Bounds = std::array<double, kBounds>;
Bounds bounds_of(const GpuModel& gpu, const simt::LaunchProfile& profile,
                 const Resources* resources);

// Estimates the time of launches in a captured graph by arithmetic: for each launch a gap plus the
// largest of its bounds, each times a factor. This is never a measurement.
struct TimeModel {
    // Between those fitted to the operations of `net` and of `wide` on an H100
    // (bench/results/2026-11-27-gpu-h100.txt).
    double gap_us = 1.6;
    Bounds factors = {2.8, 1.0, 1.0, 1.4, 1.0, 1.0};

    double us(const Bounds& launch) const;
    double us(const std::vector<Bounds>& launches) const;
    Bound largest(const Bounds& launch) const;
};

// Launches with their measured time.
struct TimedLaunches {
    std::vector<Bounds> launches;
    double measured_us = 0.0;
};
// The model that best fits every second entry, and its errors, which are medians of
// |estimate / measured - 1|.
struct FittedModel {
    TimeModel model;
    double error_before = 0.0;  // of the unfitted model, over all entries
    double error_fitted = 0.0;  // over the entries that it was fitted to
    double error_others = 0.0;  // over the other entries
};
FittedModel fit(const std::vector<TimedLaunches>& timed);

}  // namespace gyre::bench
