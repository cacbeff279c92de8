// gyre's only exception type: says what went wrong, where and what to do, and carries an exit code.
#pragma once

#include <stdexcept>
#include <string>
#include <utility>

namespace gyre {

// The exit codes of the program `gyre`; documented in docs/running.md.
enum class ExitCode : int {
    success = 0,
    internal = 1,       // a bug, or a library call that failed for an unknown reason
    usage = 2,          // flags or environment
    bad_input = 3,      // data set, model file or weights
    communication = 4,  // launch, set-up or communication between ranks
    diverged = 5,       // the loss became NaN or infinite
    differs = 6,        // what was compared is not the same to the last bit
    interrupted = 130   // Ctrl-C or SIGTERM, after a clean stop
};

class Error : public std::runtime_error {
 public:
    Error(ExitCode code, const std::string& message) : std::runtime_error(message), code_(code) {}
    ExitCode code() const noexcept { return code_; }

 private:
    ExitCode code_;
};

// Shorthands. Every message says what is wrong, where (file, flag, layer) and what to do about it.
inline Error usage_error(const std::string& message) {
    return {ExitCode::usage, message};
}
inline Error input_error(const std::string& message) {
    return {ExitCode::bad_input, message};
}

}  // namespace gyre
