#include "train/interrupt.hpp"

#include <unistd.h>

#include <csignal>
#include <initializer_list>

#include "base/error.hpp"

namespace gyre::train {
namespace {

// Written by signal handlers, so they have to be global.
volatile std::sig_atomic_t requested = 0, save = 0;

extern "C" void handle_interrupt(int) {
    if (requested) {
        _exit(static_cast<int>(ExitCode::interrupted));
    }
    requested = 1;
}

extern "C" void handle_save_request(int) {
    save = 1;
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
    return requested != 0;
}

bool take_save_request() {
    const bool asked = save != 0;
    if (asked) {
        save = 0;
    }
    return asked;
}

}  // namespace gyre::train
