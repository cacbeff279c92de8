// Fields of a protocol buffer: https://protobuf.dev/programming-guides/encoding. `number` is the
// field's in its message.
#pragma once

#include <bit>
#include <cstdint>
#include <string>
#include <string_view>

namespace gyre::model::protobuf {

template <typename T>
std::string little_endian(T value) {
    std::string bytes;
    for (std::size_t i = 0; i < sizeof(T); ++i) {
        bytes.push_back(static_cast<char>(value >> (8 * i) & 0xff));
    }
    return bytes;
}

inline std::string varint(std::uint64_t value) {
    std::string bytes;
    for (; value >= 0x80; value >>= 7) {
        bytes.push_back(static_cast<char>(value | 0x80));
    }
    bytes.push_back(static_cast<char>(value));
    return bytes;
}

inline std::string tag(int number, int wire_type) {
    return varint(static_cast<std::uint64_t>(number) << 3 | static_cast<std::uint64_t>(wire_type));
}
// int64, int32 and enums.
inline std::string int_field(int number, std::int64_t value) {
    return tag(number, 0) + varint(static_cast<std::uint64_t>(value));
}
inline std::string double_field(int number, double value) {
    return tag(number, 1) + little_endian(std::bit_cast<std::uint64_t>(value));
}
// Text, bytes, or a message.
inline std::string text_field(int number, std::string_view text) {
    std::string field = tag(number, 2);
    field += varint(text.size());
    field += text;
    return field;
}
inline std::string float_field(int number, float value) {
    return tag(number, 5) + little_endian(std::bit_cast<std::uint32_t>(value));
}

}  // namespace gyre::model::protobuf
