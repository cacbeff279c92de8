// Catch2's main function; version 3 brings it in a library instead.
#define CATCH_CONFIG_MAIN
#include "tests/catch.hpp"
