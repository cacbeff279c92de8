// Makes text from elsewhere, such as another process, safe to print on a terminal.
#pragma once

#include <fmt/format.h>

#include <string>
#include <string_view>

namespace gyre::comm {

// Control characters become \xNN, including line ends unless keep_lines is set. Text longer than
// 8192 bytes is truncated and ends with " ...".
inline std::string printable(std::string_view text, bool keep_lines = false) {
    constexpr std::size_t kMost = 8192;
    std::string shown;
    for (std::size_t i = 0; i < text.size() && i < kMost; ++i) {
        const auto byte = static_cast<unsigned char>(text[i]);
        const auto next = i + 1 < text.size() ? static_cast<unsigned char>(text[i + 1]) : 0U;
        // U+0080 to U+009F in UTF-8: control characters that some terminals obey.
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
