#pragma once

namespace gyre {

// Returns the least multiple of `unit` that is not less than the value, which is not negative.
template <typename T>
constexpr T round_up(T value, T unit) {
    return (value + unit - 1) / unit * unit;
}

}  // namespace gyre
