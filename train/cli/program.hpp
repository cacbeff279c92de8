// The program `gyre`: picks the subcommand, and turns errors into a message and an exit code.
#pragma once

namespace gyre::train {

// Runs the program with main()'s arguments, and returns its exit code.
int run_program(int argc, char** argv);

}  // namespace gyre::train
