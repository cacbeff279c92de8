// main() alone, so that tests can link everything else.
#include "train/cli/program.hpp"

int main(int argc, char** argv) {
    return gyre::train::run_program(argc, argv);
}
