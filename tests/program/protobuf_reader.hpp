// The fields of a protocol buffer's message, in order.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

namespace gyre::test {

struct ProtoField {
    int number = 0;
    std::uint64_t value = 0;  // of an integer
    std::string bytes;        // of a text or message; of a fixed-width number, little-endian
};

// Throws std::out_of_range where the message ends within a field.
inline std::vector<ProtoField> read_proto(const std::string& message) {
    std::size_t at = 0;
    const auto varint = [&] {
        std::uint64_t value = 0;
        for (int shift = 0;; shift += 7) {
            const auto byte = static_cast<unsigned char>(message.at(at++));
            value |= std::uint64_t{byte & 0x7fu} << shift;
            if (byte < 0x80) {
                return value;
            }
        }
    };
    const auto bytes = [&](std::uint64_t count) {
        if (count > message.size() - at) {
            throw std::out_of_range("a field of a protocol buffer is cut off");
        }
        at += count;
        return message.substr(at - count, count);
    };
    std::vector<ProtoField> fields;
    while (at < message.size()) {
        const std::uint64_t tag = varint();
        ProtoField field{static_cast<int>(tag >> 3), 0, {}};
        switch (tag & 7) {
            case 0:
                field.value = varint();
                break;
            case 1:
                field.bytes = bytes(8);
                break;
            case 2:
                field.bytes = bytes(varint());
                break;
            case 5:
                field.bytes = bytes(4);
                break;
            default:
                throw std::out_of_range("no wire type of a protocol buffer");
        }
        fields.push_back(field);
    }
    return fields;
}

// The texts of all fields of a number.
inline std::vector<std::string> texts_of(const std::vector<ProtoField>& fields, int number) {
    std::vector<std::string> texts;
    for (const ProtoField& field : fields) {
        if (field.number == number) {
            texts.push_back(field.bytes);
        }
    }
    return texts;
}

}  // namespace gyre::test
