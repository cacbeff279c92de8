// Ctrl-C and SIGTERM: the first asks for a clean stop after the current step, the second ends the
// process at once.
#pragma once

namespace gyre::train {

void install_interrupt_handlers();
bool interrupt_requested();

}  // namespace gyre::train
