// A hash of bits, for results that are the same on every machine.
#pragma once

#include <bit>
#include <cstdint>
#include <span>

namespace gyre::test {

// FNV-1a (Fowler, Noll and Vo), byte by byte, the low ones first.
class BitsHash {
 public:
    void add(std::span<const float> values) {
        for (const float value : values) {
            auto bits = std::bit_cast<std::uint32_t>(value);
            for (int byte = 0; byte < 4; ++byte, bits >>= 8) {
                hash_ = (hash_ ^ (bits & 255u)) * 0x100000001b3u;
            }
        }
    }
    std::uint64_t value() const { return hash_; }

 private:
    std::uint64_t hash_ = 0xcbf29ce484222325u;
};

}  // namespace gyre::test
