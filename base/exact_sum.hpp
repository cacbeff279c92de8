// Sums of squares whose bits depend neither on the order of their terms nor on who adds which.
#pragma once

#include <cstdint>
#include <cstring>

#include "base/data_type.hpp"

namespace gyre {

// A fixed-point number that is wide enough for all sums of squares of floats (a superaccumulator:
// R. M. Neal, "Fast exact summation using small and large superaccumulators", 2015). All zeros: 0.
struct ExactSum {
    // Limb k counts multiples of 2^(kLowest + 32 k), the last one the terms that are not finite.
    // It holds 2^30 terms.
    static constexpr int kLimbs = 21, kLowest = -352;
    std::int64_t limbs[kLimbs] = {};

    // What a term adds to the limbs `limb`, `limb` + 1 and `limb` + 2.
    struct Term {
        int limb;
        std::uint32_t parts[3];
    };
    // value: 0, an infinity, NaN, or from 2^-298, the square of the least float, to 2^272.
    GYRE_HOST_DEVICE static Term split(double value) {
        std::uint64_t bits = 0;
        std::memcpy(&bits, &value, sizeof bits);
        constexpr std::uint64_t kHidden = std::uint64_t{1} << 52;
        const std::uint64_t fraction = bits & (kHidden - 1);
        const int exponent = static_cast<int>(bits >> 52 & 0x7ff);
        if (exponent == 0x7ff) {
            return {kLimbs - 3, {0, 0, fraction == 0 ? 1 : kNan}};
        }
        const int place = exponent - 1075 - kLowest;  // of the fraction's lowest bit
        if (place < 0) {
            return {0, {0, 0, 0}};
        }
        const std::uint64_t whole = fraction | kHidden;
        const unsigned shift = static_cast<unsigned>(place) % 32;
        const std::uint64_t rest = whole >> (32 - shift);
        return {place >> 5,
                {static_cast<std::uint32_t>(whole << shift), static_cast<std::uint32_t>(rest),
                 static_cast<std::uint32_t>(rest >> 32)}};
    }

    void add(double value) {
        const Term term = split(value);
        for (int i = 0; i < 3; ++i) {
            limbs[term.limb + i] += term.parts[i];
        }
    }
    void add(const ExactSum& other) {
        for (int i = 0; i < kLimbs; ++i) {
            limbs[i] += other.limbs[i];
        }
    }

    // The sum, rounded in each limb.
    GYRE_HOST_DEVICE double value() const { return value_of(limbs); }
    GYRE_HOST_DEVICE static double value_of(const std::int64_t* limbs) {
        double sum = 0.0;
        for (int i = kLimbs - 2; i >= 0; --i) {
            sum = sum * 0x1p32 + static_cast<double>(limbs[i]);
        }
        const std::int64_t not_finite = limbs[kLimbs - 1];
        const double infinity = narrow::float_of(0x7f800000u);
        return not_finite == 0     ? sum * 0x1p-352
               : not_finite < kNan ? infinity
                                   : infinity - infinity;
    }

 private:
    static constexpr std::uint32_t kNan = 1u << 31;
};

// The sum of 16 squares: those of elements 8 apart are added first, then sums 4, 2 and 1 apart.
GYRE_HOST_DEVICE inline double sum_of_16_squares(const float* x) {
    double sums[8];
    for (int i = 0; i < 8; ++i) {
        const double left = x[i], right = x[i + 8];
        sums[i] = left * left + right * right;
    }
    for (int i = 0; i < 4; ++i) {
        sums[i] += sums[i + 4];
    }
    return (sums[0] + sums[2]) + (sums[1] + sums[3]);
}

}  // namespace gyre
