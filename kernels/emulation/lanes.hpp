// The state of the threads, warps and barriers of the running blocks.
#pragma once

#include <fmt/format.h>

#include <cstdint>
#include <string>

#include "kernels/emulation/emulator.hpp"
#include "kernels/emulation/fibers.hpp"
#include "kernels/emulation/place.hpp"
#include "kernels/emulation/warp.hpp"

namespace simt::emulator {

constexpr std::uint32_t kAllLanes = 0xffffffffu;

// A thread and what it waits for.
struct Lane : Thread {
    Fiber* fiber = nullptr;
    Place place;
    bool at_barrier = false;
    bool at_warp_operation = false;
    bool at_cluster = false;  // waits for the cluster's barrier
    bool arrived = false;     // has arrived at it, but not waited
    unsigned arrival = 0;     // the number of that barrier
    bool done = false;
};

struct Warp {
    std::uint32_t arrived = 0;  // lanes waiting in a warp operation
    WarpOperation operation = WarpOperation::sync;
    WarpOperands operands{};
    Place place;
};

// A barrier of threads, and the number of threads that have exited.
struct Barrier {
    unsigned waiting = 0, done = 0;
    Place place;

    // A thread reaches the barrier. Returns an error message, or an empty string.
    std::string come(const char* what, const Place& at, unsigned threads) {
        if (done > 0) {
            return fmt::format(
                "the {} at {} is reached after {} of {} threads have left the kernel", what, at,
                done, threads);
        }
        if (waiting > 0 && !same(place, at)) {
            return fmt::format("divergent {}: this thread waits at {}, others at {}", what, at,
                               place);
        }
        place = at;
        ++waiting;
        return "";
    }
};

// Throws if no GPU, or not the emulator, could run these extents.
void check_extents(const Launch& launch);

}  // namespace simt::emulator
