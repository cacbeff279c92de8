// What is to be known of a GPU to say what a launch means on it, and a model of its time.
#pragma once

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

// What ptxas reported of kernels, for one architecture.
struct Resources {
    int registers = 0;
    std::int64_t shared_bytes = 0;  // declared
};
class ResourceReports {
 public:
    // Reads the *.resources files under a folder; empty: there are none.
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

// The time of a launch in a captured graph, by arithmetic:
//   gap + the largest of: instructions to issue, wavefronts of shared memory, tensor cores, DRAM or
//   L2, the chain of dependent latencies of one block, for each round of blocks.
// Its constants (gpu_models.cpp) are guesses until they were fitted on a GPU. Never a measurement.
struct Estimate {
    double us = 0.0;
    const char* bound = "";  // which was the largest
};
Estimate estimate(const GpuModel& gpu, const emulated::LaunchProfile& profile,
                  const Resources* resources);

}  // namespace gyre::bench
