// Catch2's own code. In version 2 it lies in the header, for one file to compile, which takes long.
#define CATCH_CONFIG_RUNNER
#include "tests/catch.hpp"

int gyre::test::run_tests(int argc, char** argv) {
    return Catch::Session().run(argc, argv);
}
