// Text of others, such as another process, in a form in which a terminal sees nothing but text.
#pragma once

#include <fmt/format.h>

#include <string>
#include <string_view>

namespace gyre::comm {

// Control characters become \xNN, line ends as well unless they are kept; what is longer than most
// people read is cut off.
inline std::string printable(std::string_view text, bool keep_lines = false) {
    constexpr std::size_t kMost = 8192;
    std::string shown;
    for (std::size_t i = 0; i < text.size() && i < kMost; ++i) {
        const auto byte = static_cast<unsigned char>(text[i]);
        const auto next = i + 1 < text.size() ? static_cast<unsigned char>(text[i + 1]) : 0U;
        // U+0080 to U+009F, which some terminals obey, in UTF-8.
        const bool wide_control = byte == 0xc2 && next >= 0x80 && next < 0xa0;
        if (wide_control || (byte < 0x20 && !(keep_lines && byte == '\n')) || byte == 0x7f) {
            fmt::format_to(std::back_inserter(shown), "\\x{:02x}", byte);
            if (wide_control) {
                fmt::format_to(std::back_inserter(shown), "\\x{:02x}", next);
                ++i;
            }
        } else {
            shown += text[i];
        }
    }
    return text.size() > kMost ? shown + " ..." : shown;
}

}  // namespace gyre::comm
