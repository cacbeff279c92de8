// Data types of tensors and of gradient communication, and conversions between them.
#pragma once

#include <cstddef>
#include <cstdint>

#if defined(__CUDACC__)
#define GYRE_HOST_DEVICE __host__ __device__
#else
#define GYRE_HOST_DEVICE
#endif

namespace gyre {

// float16: IEEE binary16, unit roundoff 2^-11, largest 65504. bfloat16: the upper half of a float,
// unit roundoff 2^-8, with float's range.
enum class DataType { float32, bfloat16, float16 };

constexpr std::size_t bytes_of(DataType type) {
    return type == DataType::float32 ? 4 : 2;
}
constexpr const char* name_of(DataType type) {
    return type == DataType::float32 ? "fp32" : type == DataType::bfloat16 ? "bf16" : "fp16";
}

// Conversions round to nearest, ties to even; overflow becomes infinity and NaN stays NaN. The
// results are the same on the host and on GPUs.
namespace narrow {

union FloatBits {
    float value;
    std::uint32_t bits;
};
GYRE_HOST_DEVICE inline std::uint32_t bits_of(float value) {
    FloatBits both;
    both.value = value;
    return both.bits;
}
GYRE_HOST_DEVICE inline float float_of(std::uint32_t bits) {
    FloatBits both;
    both.bits = bits;
    return both.value;
}

GYRE_HOST_DEVICE inline std::uint16_t to_bfloat16(float value) {
    const std::uint32_t bits = bits_of(value);
    const std::uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    const bool nan = (bits & 0x7fffffffu) > 0x7f800000u;
    return static_cast<std::uint16_t>(nan ? (bits >> 16) | 0x40u : rounded);
}
GYRE_HOST_DEVICE inline float from_bfloat16(std::uint16_t value) {
    return float_of(std::uint32_t{value} << 16);
}

GYRE_HOST_DEVICE inline std::uint16_t to_float16(float value) {
    const std::uint32_t bits = bits_of(value);
    const std::uint32_t sign = (bits >> 16) & 0x8000u;
    const std::uint32_t magnitude = bits & 0x7fffffffu;
    // Below 2^-14 the spacing is 2^-24: adding 0.5 leaves the rounded multiple in the lowest bits.
    const std::uint32_t small = bits_of(float_of(magnitude) + 0.5f) - bits_of(0.5f);
    // Otherwise drop 13 bits of the mantissa and change the exponent's bias from 127 to 15.
    const std::uint32_t normal =
        (magnitude + 0xfffu + ((magnitude >> 13) & 1u) - (std::uint32_t{127 - 15} << 23)) >> 13;
    const std::uint32_t large = magnitude > 0x7f800000u ? 0x7e00u : 0x7c00u;
    const std::uint32_t result = magnitude >= 0x477ff000u  ? large  // 65520 and more, NaN
                                 : magnitude < 0x38800000u ? small  // 2^-14
                                                           : normal;
    return static_cast<std::uint16_t>(sign | result);
}
GYRE_HOST_DEVICE inline float from_float16(std::uint16_t value) {
    const std::uint32_t sign = (std::uint32_t{value} & 0x8000u) << 16;
    const std::uint32_t magnitude = std::uint32_t{value} & 0x7fffu;
    const std::uint32_t normal = (magnitude << 13) + (std::uint32_t{127 - 15} << 23);
    const std::uint32_t large = (magnitude << 13) | 0x7f800000u;
    const std::uint32_t small = bits_of(static_cast<float>(magnitude) * 0x1p-24f);
    return float_of(sign | (magnitude >= 0x7c00u ? large : magnitude < 0x400u ? small : normal));
}

template <DataType type>
GYRE_HOST_DEVICE inline std::uint16_t to(float value) {
    return type == DataType::bfloat16 ? to_bfloat16(value) : to_float16(value);
}
template <DataType type>
GYRE_HOST_DEVICE inline float from(std::uint16_t value) {
    return type == DataType::bfloat16 ? from_bfloat16(value) : from_float16(value);
}

}  // namespace narrow
}  // namespace gyre
