// Counts what kernels do, as they run on the emulator: what a GPU's profiler would count, but for
// time.
//
// A request is one execution of one place in the program by a warp: the k-th time that each of its
// lanes gets there, between two barriers of the block. Of a request
//   to global memory: the sectors of 32 bytes that it touches (a warp's 32 floats in a row: 4);
//   to shared memory: its wavefronts, each with one 4-byte word from each of 32 banks; accesses of
//   8
//     and 16 bytes go by halves and quarters of the warp. Lanes that want the same word share it.
//   to the shared memory of another block of the cluster: 32-byte sectors, as to global memory.
// CUDA C++ Programming Guide, "Device Memory Accesses", "Shared Memory". Not counted: what the
// compiler for GPUs would do otherwise, such as loads that it moves or merges, spilled registers,
// caches.
//
// FLOPs are counted by executed basic blocks of the program, whose instructions the disassembly
// says: additions, multiplications, divisions and roots one each, fused multiply-adds two,
// calls of expf and the like none. Tensor cores': 2 m n k for each mma of a warp.
//
// For programs that are linked with gyre_emulated_profiled; kernels of their own need
// GYRE_CHECKER_OPTIONS.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "kernels/emulation/emulator.hpp"

namespace gyre::emulated {

// Requests of one kind, and what became of them.
struct Traffic {
    std::int64_t requests = 0;
    std::int64_t lanes = 0;         // that took part, over all requests
    std::int64_t bytes = 0;         // that they asked for, each once a request
    std::int64_t transactions = 0;  // sectors or wavefronts
    std::int64_t least = 0;         // that so many lanes and bytes need

    double per_request() const { return ratio(transactions, requests); }
    double excess() const { return ratio(transactions, least); }  // 1: as few as can be
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
    int bytes = 0;  // of a lane
    Traffic traffic;
};

struct LaunchProfile {
    emulator::Launch launch;
    std::int64_t blocks = 0;                           // that ran
    std::int64_t barriers = 0, warp_operations = 0;    // of blocks, of warps
    std::int64_t cluster_barriers = 0;                 // for each block that has part in one
    std::int64_t flop = 0, tensor_flop = 0, mmas = 0;  // mmas: of warps
    // Of a block's threads, the share that works as long as the busiest: instructions of all over
    // threads times those of the busiest.
    double busy = 0.0;
    // What warps must issue for arithmetic: FLOPs / 2 of each warp's busiest lane.
    std::int64_t warp_fmas = 0;
    // The longest way through a block, on average: of each interval between barriers that warp's
    // which has the most. phases: intervals that load from global memory, and that touch other
    // blocks' shared memory.
    double longest_requests = 0.0, longest_fmas = 0.0, longest_mmas = 0.0, load_phases = 0.0;
    double remote_phases = 0.0;
    // Of global memory, each sector once; scaled where not all blocks ran.
    double read_bytes = 0.0, written_bytes = 0.0;
    Traffic global_loads, global_stores, shared_loads, shared_stores, remote_loads, remote_stores;
    std::vector<PlaceProfile> places;

    double threads_per_block() const { return static_cast<double>(launch.block.count()); }
    // By how much counts of blocks that ran have to be multiplied for those of the grid.
    double scale() const {
        return blocks == 0 ? 0.0
                           : static_cast<double>(launch.grid.count()) / static_cast<double>(blocks);
    }
};

// From now on launches are counted. Not with the checker.
void enable_profiler();
// Those that have run since the last call, in order.
std::vector<LaunchProfile> take_profiles();
// A table of them, and under each the places that cost the most above what they need.
std::string text_of(const LaunchProfile& profile, const std::string& title);

}  // namespace gyre::emulated
