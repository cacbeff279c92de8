// Checks of error messages without Catch2's matchers, whose names differ between v2 and v3.
#pragma once

#include <initializer_list>
#include <string>

#include "base/error.hpp"
#include "tests/support/catch.hpp"

namespace gyre::test {

// Requires that `call` throws a gyre::Error with `code` whose message contains every part.
template <class Call>
void expect_error(ExitCode code, std::initializer_list<std::string> parts, Call&& call) {
    try {
        call();
    } catch (const Error& error) {
        const std::string message = error.what();
        INFO("message: " << message);
        CHECK(static_cast<int>(error.code()) == static_cast<int>(code));
        for (const std::string& part : parts) {
            INFO("expected to contain: " << part);
            CHECK(message.find(part) != std::string::npos);
        }
        return;
    }
    FAIL("expected a gyre::Error, but nothing was thrown");
}

}  // namespace gyre::test
