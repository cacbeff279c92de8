// Catch2's own code: version 2 has it in the header, to be compiled in one file, which takes long.
#define CATCH_CONFIG_RUNNER
#include "tests/support/catch.hpp"

int gyre::test::run_tests(int argc, char** argv) {
    return Catch::Session().run(argc, argv);
}
