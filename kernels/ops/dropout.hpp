// What dropout keeps, and what becomes of it, the same on every device.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

namespace gyre {

// An element is kept where its random word >= probability * 2^32, in integers: where it is larger
// than this.
inline std::uint32_t largest_dropped_word(float probability) {
    return static_cast<std::uint32_t>(
        std::max(0.0, std::ceil(static_cast<double>(probability) * 0x1p32) - 1.0));
}

// The factor of what is kept: 1 / (1 - probability); 0 where nothing is.
inline float kept_factor(float probability) {
    return probability < 1.0f ? 1.0f / (1.0f - probability) : 0.0f;
}

}  // namespace gyre
