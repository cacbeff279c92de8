// The main function of tests that do not need their own.
#include "kernels/emulation/checker.hpp"
#include "tests/support/run_tests.hpp"

int main(int argc, char** argv) {
    simt::enable_checker();
    return gyre::test::run_tests(argc, argv);
}
