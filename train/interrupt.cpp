#include "train/interrupt.hpp"

#include <unistd.h>

#include <atomic>
#include <csignal>
#include <initializer_list>

#include "base/error.hpp"

namespace gyre::train {
namespace {

// Written by signal handlers, which any thread may run: global, and atomic without a lock.
std::atomic<bool> requested{false}, save{false};
static_assert(std::atomic<bool>::is_always_lock_free);

extern "C" void handle_interrupt(int) {
    if (requested.exchange(true)) {
        _exit(static_cast<int>(ExitCode::interrupted));
    }
}

extern "C" void handle_save_request(int) {
    save = true;
}

}  // namespace

void install_interrupt_handlers() {
    struct sigaction action = {};
    action.sa_handler = handle_interrupt;
    action.sa_flags = SA_RESTART;
    for (const int signal : {SIGINT, SIGTERM}) {
        sigaction(signal, &action, nullptr);
    }
    action.sa_handler = handle_save_request;
    sigaction(SIGUSR1, &action, nullptr);
}

bool interrupt_requested() {
    return requested;
}

bool take_save_request() {
    return save.exchange(false);
}

}  // namespace gyre::train
