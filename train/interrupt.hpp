// Ctrl-C and SIGTERM: the first asks for a clean stop after the current step, the second ends the
// process at once. SIGUSR1, with which schedulers warn: asks for a checkpoint.
#pragma once

namespace gyre::train {

// Called when the program starts: a warning that comes before the training has begun must not end
// it.
void install_save_request_handler();
// Called when there is something to save: until then Ctrl-C and SIGTERM end the process at once.
void install_interrupt_handlers();
bool interrupt_requested();
// Returns true if a checkpoint has been asked for since the last call.
bool take_save_request();

}  // namespace gyre::train
