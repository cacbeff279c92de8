// A hash to compare the data of processes and to detect damage; it is not cryptographic.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace gyre::data {

// Multiplies and shifts, eight bytes at a time.
class Hash {
 public:
    void add(const void* data, std::size_t bytes) {
        const auto* at = static_cast<const unsigned char*>(data);
        mix(bytes);
        for (; bytes >= 8; at += 8, bytes -= 8) {
            std::uint64_t word;
            std::memcpy(&word, at, 8);
            mix(word);
        }
        std::uint64_t rest = 0;
        std::memcpy(&rest, at, bytes);
        mix(rest);
    }
    std::uint64_t value() const { return state_; }

 private:
    void mix(std::uint64_t word) {
        state_ = (state_ ^ word) * 0x9E3779B97F4A7C15u;
        state_ ^= state_ >> 29;
    }
    std::uint64_t state_ = 0x6779726500000000u;
};

}  // namespace gyre::data
