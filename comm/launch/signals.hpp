// The signals that a launcher passes on to its ranks.
#pragma once

#include <poll.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include <array>
#include <csignal>

#include "base/clock.hpp"
#include "base/descriptor.hpp"
#include "comm/launch/meeting_error.hpp"

namespace gyre::comm {

// While it exists, the signals that a launcher passes on, and that of an ended rank, wait to be
// read.
class Signals {
 public:
    Signals() {
        sigset_t signals;
        sigemptyset(&signals);
        sigaddset(&signals, SIGCHLD);
        for (const int signal : kForwarded) {
            sigaddset(&signals, signal);
        }
        sigprocmask(SIG_BLOCK, &signals, &before_);
        fd_ = Descriptor(signalfd(-1, &signals, SFD_CLOEXEC | SFD_NONBLOCK));
    }
    ~Signals() { sigprocmask(SIG_SETMASK, &before_, nullptr); }
    Signals(const Signals&) = delete;
    Signals& operator=(const Signals&) = delete;

    int fd() const { return fd_.fd(); }
    const sigset_t& before() const { return before_; }
    // The next one that has come; 0: none has.
    int next() const {
        signalfd_siginfo info;
        return read(fd(), &info, sizeof info) == sizeof info ? static_cast<int>(info.ssi_signo) : 0;
    }
    static bool asks_to_end(int signal) {
        return signal == SIGINT || signal == SIGTERM || signal == SIGHUP;
    }
    // Waits for so long, or until a signal asks this process to end, which is returned; 0: none
    // did.
    int wait(double seconds) const {
        const auto deadline = deadline_in(seconds);
        for (;;) {
            for (int signal = next(); signal != 0; signal = next()) {
                if (asks_to_end(signal)) {
                    return signal;
                }
            }
            const double left = -seconds_since(deadline);
            if (left <= 0.0) {
                return 0;
            }
            pollfd come{fd(), POLLIN, 0};
            poll(&come, 1, 1 + static_cast<int>(left * 1000.0));
        }
    }

 private:
    static constexpr std::array kForwarded = {SIGINT, SIGTERM, SIGHUP, SIGUSR1, SIGUSR2};

    sigset_t before_;
    Descriptor fd_;
};

}  // namespace gyre::comm
