// The program `gyre`: picks the subcommand, and turns errors into a message and an exit code.
#pragma once

namespace gyre::train {

// What main() is given; the exit code.
int run_program(int argc, char** argv);

}  // namespace gyre::train
