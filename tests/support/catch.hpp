// Catch2 in either major version: v3 (Ubuntu 24.04) has catch_all.hpp, v2 (Debian 12) catch.hpp.
#pragma once

#include "tests/support/run_tests.hpp"
#if __has_include(<catch2/catch_all.hpp>)
#include <catch2/catch_all.hpp>
using Catch::Approx;  // as v2 declares it
#else
#include <catch2/catch.hpp>
#endif
