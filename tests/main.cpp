// The main function of the tests that need none of their own; works with Catch2 v2 and v3.
#define CATCH_CONFIG_RUNNER
#include "tests/catch.hpp"
#if defined(GYRE_CHECKER)
#include "kernels/emulation/checker.hpp"
#endif

int main(int argc, char** argv) {
#if defined(GYRE_CHECKER)
    gyre::emulated::enable_checker();
#endif
    return Catch::Session().run(argc, argv);
}
