// A monotonic clock: unaffected by changes of the system time.
#pragma once

#include <chrono>

namespace gyre {

using Clock = std::chrono::steady_clock;

inline double seconds_since(Clock::time_point start) {
    return std::chrono::duration<double>(Clock::now() - start).count();
}

}  // namespace gyre
