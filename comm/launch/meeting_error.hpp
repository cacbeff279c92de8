// Errors of the ranks' meeting.
#pragma once

#include <string>
#include <system_error>

#include "base/clock.hpp"
#include "base/error.hpp"

namespace gyre::comm {

inline Error meeting_error(const std::string& message) {
    return {ExitCode::communication, message};
}

inline std::string error_text(int error) {
    return std::generic_category().message(error);
}

inline Clock::time_point deadline_in(double seconds) {
    return Clock::now() +
           std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
}

}  // namespace gyre::comm
