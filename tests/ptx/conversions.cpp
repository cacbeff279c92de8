// Moves, and conversions from one type to another.
#include <cmath>
#include <limits>

#include "tests/ptx/instructions.hpp"
#include "tests/ptx/narrow.hpp"
#include "tests/ptx/warp.hpp"

namespace gyre::ptx {

float float_of_f16(std::uint32_t half) {
    const std::uint32_t sign = (half & 0x8000u) << 16, exponent = half >> 10 & 31;
    const std::uint32_t mantissa = half & 1023;
    if (exponent == 31) {
        return mantissa != 0 ? std::numeric_limits<float>::quiet_NaN()
                             : std::bit_cast<float>(sign | 0x7f800000u);
    }
    if (exponent == 0) {
        const float value = static_cast<float>(mantissa) * 0x1p-24f;
        return sign != 0 ? -value : value;
    }
    return std::bit_cast<float>(sign | (exponent + 127 - 15) << 23 | mantissa << 13);
}
float float_of_bf16(std::uint32_t half) {
    return std::bit_cast<float>(half << 16);
}

namespace {

enum class Rounding { nearest_even, towards_zero };

template <Rounding kRounding>
std::uint32_t f16_of_float(float value) {
    const std::uint32_t sign = std::signbit(value) ? 0x8000u : 0u;
    if (std::isnan(value)) {
        return 0x7fffu;
    }
    const double magnitude = std::fabs(double{value});
    if (std::isinf(value)) {
        return sign | 0x7c00u;
    }
    int exponent = 0;
    std::frexp(magnitude, &exponent);  // below 2^exponent
    const int unit = std::max(exponent - 11, -24);
    const double units = std::ldexp(magnitude, -unit);
    const double rounded = std::ldexp(
        kRounding == Rounding::nearest_even ? std::nearbyint(units) : std::trunc(units), unit);
    if (rounded > 65504.0) {
        return sign | (kRounding == Rounding::nearest_even ? 0x7c00u : 0x7bffu);
    }
    if (rounded < 0x1p-14) {
        return sign | static_cast<std::uint32_t>(std::ldexp(rounded, 24));
    }
    std::frexp(rounded, &exponent);
    return sign | static_cast<std::uint32_t>(exponent + 14) << 10 |
           (static_cast<std::uint32_t>(std::ldexp(rounded, 11 - exponent)) & 1023u);
}

// The upper bits of a float, of which the lower `kRest` are rounded away.
template <Rounding kRounding, int kRest>
std::uint32_t upper_bits(float value) {
    const auto bits = std::bit_cast<std::uint32_t>(value);
    const std::uint32_t rest = bits & ((1u << kRest) - 1), half = 1u << (kRest - 1);
    std::uint32_t upper = bits >> kRest;
    if (kRounding == Rounding::nearest_even && !std::isinf(value) &&
        (rest > half || (rest == half && (upper & 1u) != 0))) {
        ++upper;
    }
    return upper;
}
template <Rounding kRounding>
std::uint32_t bf16_of_float(float value) {
    return std::isnan(value) ? 0x7fffu : upper_bits<kRounding, 16>(value);
}
template <Rounding kRounding>
std::uint32_t tf32_of_float(float value) {
    return std::isnan(value) ? 0x7fffffffu : upper_bits<kRounding, 13>(value) << 13;
}
// Ties go away from zero.
std::uint32_t tf32_of_float_ties_away(float value) {
    const auto bits = std::bit_cast<std::uint32_t>(value);
    const std::uint32_t rest = bits & 0x1fffu;
    if (std::isnan(value)) {
        return 0x7fffffffu;
    }
    return std::isinf(value) ? bits : bits - rest + (rest >= 0x1000u ? 0x2000u : 0u);
}

template <std::uint32_t (*kConvert)(float)>
void to_one(Warp& warp, const Instruction& instruction, std::uint32_t mask) {
    auto* const d = result<std::uint32_t>(warp, instruction);
    const auto* const a = source<float>(warp, instruction, 0);
    for_lanes(mask, [=](int i) { d[i] = kConvert(a[i]); });
}
// The first source is the upper half.
template <std::uint32_t (*kConvert)(float)>
void to_two(Warp& warp, const Instruction& instruction, std::uint32_t mask) {
    auto* const d = result<std::uint32_t>(warp, instruction);
    const auto *const a = source<float>(warp, instruction, 0), *const b = source<float>(
                                                                   warp, instruction, 1);
    for_lanes(mask, [=](int i) { d[i] = kConvert(a[i]) << 16 | kConvert(b[i]); });
}
void from_f16(Warp& warp, const Instruction& instruction, std::uint32_t mask) {
    auto* const d = result<float>(warp, instruction);
    const auto* const a = source<std::uint16_t>(warp, instruction, 0);
    for_lanes(mask, [=](int i) { d[i] = float_of_f16(a[i] & 0xffffu); });
}
template <typename From, typename To>
void convert(Warp& warp, const Instruction& instruction, std::uint32_t mask) {
    auto* const d = result<To>(warp, instruction);
    const auto* const a = source<From>(warp, instruction, 0);
    for_lanes(mask, [=](int i) {
        d[i] = static_cast<InRegister<To>>(static_cast<To>(static_cast<From>(a[i])));
    });
}

template <typename T>
void move(Warp& warp, const Instruction& instruction, std::uint32_t mask) {
    auto* const d = result<T>(warp, instruction);
    const auto* const a = source<T>(warp, instruction, 0);
    for_lanes(mask, [=](int i) { d[i] = a[i]; });
}
// The first of two is the lower half.
template <typename T, int kHalf>
void unpack(Warp& warp, const Instruction& instruction, std::uint32_t mask) {
    auto *const low = result<std::uint32_t>(warp, instruction), *const high = result<std::uint32_t>(
                                                                    warp, instruction, 1);
    const auto* const a = source<T>(warp, instruction, 0);
    for_lanes(mask, [=](int i) {
        const T value = a[i];
        low[i] = static_cast<std::uint32_t>(value & ((T{1} << kHalf) - 1));
        high[i] = static_cast<std::uint32_t>(value >> kHalf);
    });
}
template <typename T, int kHalf>
void pack(Warp& warp, const Instruction& instruction, std::uint32_t mask) {
    auto* const d = result<T>(warp, instruction);
    const auto *const low = source<std::uint32_t>(warp, instruction, 0), *const high =
                                                                             source<std::uint32_t>(
                                                                                 warp, instruction,
                                                                                 1);
    for_lanes(mask, [=](int i) { d[i] = T{high[i]} << kHalf | (low[i] & ((T{1} << kHalf) - 1)); });
}

template <typename From>
void add_integers_of(Handlers& handlers, const std::string& from) {
    const auto name = [&](const char* to) { return std::string("cvt.") + to + "." + from; };
    handlers.add(name("u16") + " " + name("s16"), convert<From, std::uint16_t>);
    handlers.add(name("u32"), convert<From, std::uint32_t>);
    handlers.add(name("s32"), convert<From, std::int32_t>);
    handlers.add(name("u64"), convert<From, std::uint64_t>);
    handlers.add(name("s64"), convert<From, std::int64_t>);
}

}  // namespace

void add_conversions(Handlers& handlers) {
    using std::int8_t, std::int16_t, std::int32_t, std::int64_t, std::uint8_t, std::uint16_t,
        std::uint32_t, std::uint64_t;
    constexpr auto kEven = Rounding::nearest_even, kZero = Rounding::towards_zero;
    handlers.add("mov.b32", move<uint32_t>);
    handlers.add("mov.b64 cvta.to.global.u64 cvta.global.u64", move<uint64_t>);
    handlers.add("mov.unpack64", unpack<uint64_t, 32>);
    handlers.add("mov.unpack32", unpack<uint32_t, 16>);
    handlers.add("mov.pack64", pack<uint64_t, 32>);
    handlers.add("mov.pack32", pack<uint32_t, 16>);
    handlers.add("cvt.f64.f32", convert<float, double>);
    handlers.add("cvt.rn.f32.f64", convert<double, float>);
    handlers.add("cvt.rn.f32.s32", convert<int32_t, float>);
    handlers.add("cvt.rn.f32.u32", convert<uint32_t, float>);
    handlers.add("cvt.rn.f32.u16", convert<uint16_t, float>);
    handlers.add("cvt.rn.f64.s32", convert<int32_t, double>);
    handlers.add("cvt.rn.f64.u32", convert<uint32_t, double>);
    handlers.add("cvt.rn.f64.s64", convert<int64_t, double>);
    add_integers_of<uint8_t>(handlers, "u8");
    add_integers_of<int8_t>(handlers, "s8");
    add_integers_of<uint16_t>(handlers, "u16");
    add_integers_of<int16_t>(handlers, "s16");
    add_integers_of<uint32_t>(handlers, "u32");
    add_integers_of<int32_t>(handlers, "s32");
    add_integers_of<uint64_t>(handlers, "u64");
    add_integers_of<int64_t>(handlers, "s64");
    handlers.add("cvt.f32.f16", from_f16);
    handlers.add("cvt.rn.f16x2.f32", to_two<f16_of_float<kEven>>);
    handlers.add("cvt.rz.f16x2.f32", to_two<f16_of_float<kZero>>);
    handlers.add("cvt.rn.bf16x2.f32", to_two<bf16_of_float<kEven>>);
    handlers.add("cvt.rz.bf16x2.f32", to_two<bf16_of_float<kZero>>);
    handlers.add("cvt.rna.tf32.f32", to_one<tf32_of_float_ties_away>);
    handlers.add("cvt.rn.tf32.f32", to_one<tf32_of_float<kEven>>);
    handlers.add("cvt.rz.tf32.f32", to_one<tf32_of_float<kZero>>);
}

}  // namespace gyre::ptx
