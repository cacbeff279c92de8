// Dropout's threshold and scale, shared by all devices.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

namespace gyre {

// An element is kept if its random word is >= probability * 2^32; in integers, if it is greater
// than this value.
inline std::uint32_t largest_dropped_word(float probability) {
    return static_cast<std::uint32_t>(
        std::max(0.0, std::ceil(static_cast<double>(probability) * 0x1p32) - 1.0));
}

// The scale of kept elements, 1 / (1 - probability); 0 if nothing is kept.
inline float kept_factor(float probability) {
    return probability < 1.0f ? 1.0f / (1.0f - probability) : 0.0f;
}

}  // namespace gyre
