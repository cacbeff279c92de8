// The main function of the tests that need none of their own.
#include "tests/run_tests.hpp"
#if defined(GYRE_CHECKER)
#include "kernels/emulation/checker.hpp"
#endif

int main(int argc, char** argv) {
#if defined(GYRE_CHECKER)
    gyre::emulated::enable_checker();
#endif
    return gyre::test::run_tests(argc, argv);
}
