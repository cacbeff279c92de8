#include "train/interrupt.hpp"

#include <unistd.h>

#include <atomic>
#include <csignal>

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

void handle(int signal, void (*handler)(int)) {
    struct sigaction action = {};
    action.sa_handler = handler;
    action.sa_flags = SA_RESTART;
    sigaction(signal, &action, nullptr);
}

}  // namespace

void install_save_request_handler() {
    handle(SIGUSR1, handle_save_request);
}

void install_interrupt_handlers() {
    handle(SIGINT, handle_interrupt);
    handle(SIGTERM, handle_interrupt);
}

bool interrupt_requested() {
    return requested;
}

bool take_save_request() {
    return save.exchange(false);
}

}  // namespace gyre::train
