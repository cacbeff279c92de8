#include "train/interrupt.hpp"

#include <unistd.h>

#include <csignal>
#include <initializer_list>

#include "kernels/base/error.hpp"

namespace gyre::train {
namespace {

volatile std::sig_atomic_t requested = 0;  // written by a signal handler, so it has to be global

extern "C" void handle_interrupt(int) {
    if (requested) {
        _exit(static_cast<int>(ExitCode::interrupted));
    }
    requested = 1;
}

}  // namespace

void install_interrupt_handlers() {
    struct sigaction action = {};
    action.sa_handler = handle_interrupt;
    action.sa_flags = SA_RESTART;
    for (const int signal : {SIGINT, SIGTERM}) {
        sigaction(signal, &action, nullptr);
    }
}

bool interrupt_requested() {
    return requested != 0;
}

}  // namespace gyre::train
