// Errors of the ranks' meeting.
#pragma once

#include <cerrno>
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

// A call of a launcher's to the system has failed, with errno.
inline Error launcher_error(const std::string& what) {
    return meeting_error("gyre launch: " + what + ": " + error_text(errno) +
                         "; is there a limit on processes or files (ulimit -a)?");
}

inline Clock::time_point deadline_in(double seconds) {
    return Clock::now() +
           std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
}

}  // namespace gyre::comm
