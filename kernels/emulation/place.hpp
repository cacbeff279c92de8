// The source locations at which threads wait.
#pragma once

#include <fmt/format.h>

#include <cstring>
#include <source_location>

// Does not allocate a string, which an abandoned fiber would never free.
template <>
struct fmt::formatter<std::source_location> {
    constexpr auto parse(format_parse_context& context) { return context.begin(); }
    template <typename Context>
    auto format(const std::source_location& place, Context& context) const {
        return fmt::format_to(context.out(), "{}:{}", place.file_name(), place.line());
    }
};

namespace simt::emulator {

inline bool same(const std::source_location& a, const std::source_location& b) {
    return a.line() == b.line() && a.column() == b.column() &&
           std::strcmp(a.file_name(), b.file_name()) == 0;
}

}  // namespace simt::emulator
