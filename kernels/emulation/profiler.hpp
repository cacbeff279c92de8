// Counts the work of kernels as they run on the emulator: what a GPU's profiler would count, except
// for time.
//
// A request is one execution of one place in the program by a warp: the k-th time that each of its
// lanes gets there between two barriers of the block. Counted for a request
//   to global memory: the 32-byte sectors that it touches (32 consecutive floats of a warp: 4);
//   to shared memory: its wavefronts, each with one 4-byte word from each of 32 banks; accesses of
//   8
//     and 16 bytes are split into halves and quarters of the warp. Lanes share equal words.
//   to the shared memory of another block of the cluster: 32-byte sectors, as to global memory.
// See the CUDA C++ Programming Guide, "Device Memory Accesses", "Shared Memory". Not modelled:
// differences in the GPU compiler's code, such as moved or merged loads and spilled registers, and
// caches.
//
// FLOPs are counted per executed basic block of the program, from its disassembly: one for
// additions, multiplications, divisions and roots, two for fused multiply-adds, none for calls of
// expf and the like. Tensor cores: 2 m n k for each mma of a warp.
//
// For programs linked with simt_emulator_profiled; their own kernels must be compiled with
// SIMT_CHECKER_OPTIONS.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "kernels/emulation/emulator.hpp"

namespace simt {

// Requests of one kind, and their cost.
struct Traffic {
    std::int64_t requests = 0;
    std::int64_t lanes = 0;         // active lanes, over all requests
    std::int64_t bytes = 0;         // bytes requested, each counted once per request
    std::int64_t transactions = 0;  // sectors or wavefronts
    std::int64_t least = 0;         // fewest transactions possible for these lanes and bytes

    double per_request() const { return ratio(transactions, requests); }
    double excess() const { return ratio(transactions, least); }  // 1: the minimum
    double lanes_per_request() const { return ratio(lanes, requests); }
    Traffic& operator+=(const Traffic& other);
    static double ratio(std::int64_t a, std::int64_t b) {
        return b == 0 ? 0.0 : static_cast<double>(a) / static_cast<double>(b);
    }
};

enum class Space { global, shared, remote };  // remote: another block's shared memory

// One place in the program that accesses memory.
struct PlaceProfile {
    std::uint32_t pc = 0;  // place_of()'s
    Space space = Space::global;
    bool write = false;
    int bytes = 0;  // per lane
    Traffic traffic;
};

struct LaunchProfile {
    emulator::Launch launch;
    std::int64_t blocks = 0;                           // executed blocks
    std::int64_t barriers = 0, warp_operations = 0;    // summed over blocks, over warps
    std::int64_t cluster_barriers = 0;                 // counted once per participating block
    std::int64_t flop = 0, tensor_flop = 0, mmas = 0;  // mmas: of warps
    // The utilisation of a block's threads: instructions of all threads / (threads * those of the
    // busiest).
    double busy = 0.0;
    // Arithmetic instructions that warps must issue: FLOPs / 2 of each warp's busiest lane.
    std::int64_t warp_fmas = 0;
    // The average critical path of a block: for each interval between barriers, the warp with the
    // most. phases: intervals that load from global memory, and intervals that access other blocks'
    // shared memory.
    double longest_requests = 0.0, longest_fmas = 0.0, longest_mmas = 0.0, load_phases = 0.0;
    double remote_phases = 0.0;
    // Global memory traffic, with each sector counted once; scaled if not all blocks ran.
    double read_bytes = 0.0, written_bytes = 0.0;
    Traffic global_loads, global_stores, shared_loads, shared_stores, remote_loads, remote_stores;
    std::vector<PlaceProfile> places;

    // The factor from counts of the executed blocks to those of the whole grid.
    double scale() const {
        return blocks == 0 ? 0.0
                           : static_cast<double>(launch.grid.count()) / static_cast<double>(blocks);
    }
};

// Starts counting launches. Cannot be combined with the checker.
void enable_profiler();
// The launches since the last call, in order.
std::vector<LaunchProfile> take_profiles();
// Formats a table, followed by the places that exceed their minimum cost the most.
std::string text_of(const LaunchProfile& profile, const std::string& title);

}  // namespace simt
