#pragma once

namespace gyre::test {

// Runs the program's Catch2 cases selected by the arguments; returns the exit code.
int run_tests(int argc, char** argv);

}  // namespace gyre::test
