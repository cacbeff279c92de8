// The main function of the tests that need none of their own; works with Catch2 v2 and v3.
#define CATCH_CONFIG_RUNNER
#include "tests/catch.hpp"

int main(int argc, char** argv) {
    return Catch::Session().run(argc, argv);
}
