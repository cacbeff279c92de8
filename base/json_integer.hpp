// Reads integers from JSON that somebody else may have written.
#pragma once

#include <fmt/format.h>

#include <nlohmann/json.hpp>
#include <stdexcept>
#include <utility>

namespace gyre {

// The value as an Integer. JSON's own conversion of 1e300, of a fraction or of a negative number to
// an unsigned type would be undefined or something else than what is written. Throws
// std::out_of_range that shows the value if it is not an integer or does not fit.
template <class Integer>
Integer json_integer(const nlohmann::json& value) {
    if (value.is_number_unsigned()) {
        if (const auto n = value.get<std::uint64_t>(); std::in_range<Integer>(n)) {
            return static_cast<Integer>(n);
        }
    } else if (value.is_number_integer()) {
        if (const auto n = value.get<std::int64_t>(); std::in_range<Integer>(n)) {
            return static_cast<Integer>(n);
        }
    }
    throw std::out_of_range(
        fmt::format("{} instead of an integer{} of at most {} bits",
                    value.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace),
                    std::is_signed_v<Integer> ? "" : " from 0 on", 8 * sizeof(Integer)));
}

}  // namespace gyre
