// What the emulator knows of threads, warps and barriers of the blocks that run.
#pragma once

#include <fmt/format.h>

#include <cstdint>
#include <string>

#include "kernels/emulation/emulator.hpp"
#include "kernels/emulation/fibers.hpp"
#include "kernels/emulation/place.hpp"
#include "kernels/emulation/warp.hpp"

namespace gyre::emulated::emulator {

constexpr std::uint32_t kAllLanes = 0xffffffffu;

// What a thread waits for.
struct Lane : Thread {
    Fiber* fiber = nullptr;
    Place place;
    bool at_barrier = false;
    bool at_warp_operation = false;
    bool at_cluster = false;  // waits for its barrier
    bool arrived = false;     // there, and has not waited
    unsigned arrival = 0;     // at which of its barriers
    bool done = false;
};

struct Warp {
    std::uint32_t arrived = 0;  // lanes that wait in a warp operation
    WarpOperation operation = WarpOperation::sync;
    WarpOperands operands{};
    Place place;
};

// A barrier of threads, and how many of them there are no more.
struct Barrier {
    unsigned waiting = 0, done = 0;
    Place place;

    // A thread comes to it. What is wrong with that; empty: nothing.
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

// Throws where no GPU, or not the emulator, could run so many blocks and threads.
void check_extents(const Launch& launch);

}  // namespace gyre::emulated::emulator
