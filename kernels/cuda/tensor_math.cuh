// The arithmetic of tensor cores: operands in TF32, which are floats in memory, or in 16 bits.
//
// A Math has
//   Elem               type of operands and values in memory
//   kType              DataType of values
//   kOne               the bits of 1
//   pack(low, high)    packs two floats into 16-bit operands
//   multiply(d, a, b)  d += a b, for a warp (fragments: simt.hpp)
//   load(elem)         a value, or an operand, as a float
//   value(sum)         the value as stored between layers by default
//   operand(value)     rounded in advance as products would round it
//   load4, store4      four values; `at` is aligned for all four
//   rounded4(floats)   as if they had been stored
//   store_values, store_operands(at, first, second)   two of them; `at` is aligned for both
//   store_operands(at, four)
#pragma once

#include <memory>

#include "base/data_type.hpp"
#include "kernels/cuda/simt.hpp"
#include "kernels/ops/op.hpp"

namespace gyre::SIMT_NAMESPACE {

struct Tf32Math {
    using Elem = float;
    static constexpr DataType kType = DataType::float32;
    static constexpr std::uint32_t kOne = 0x3f800000u;
    static __device__ __forceinline__ void multiply(float (&d)[4], const std::uint32_t (&a)[4],
                                                    const std::uint32_t (&b)[2]) {
        mma_tf32(d, a, b);
    }
    static __device__ __forceinline__ float load(float value) { return value; }
    static __device__ __forceinline__ float value(float sum) { return sum; }
    static __device__ __forceinline__ float operand(float value) {
        const std::uint32_t bits = to_tf32(value);
        memcpy(&value, &bits, sizeof value);
        return value;
    }
    static __device__ __forceinline__ float4 load4(const float* at) {
        return load_vector<float4>(at);
    }
    static __device__ __forceinline__ void store4(float* at, const float4& values) {
        store_vector(at, values);
    }
    static __device__ __forceinline__ float4 rounded4(const float4& values) { return values; }
    static __device__ __forceinline__ void store_values(float* at, float first, float second) {
        float2 pair;
        pair.x = first;
        pair.y = second;
        store_vector(at, pair);
    }
    static __device__ __forceinline__ void store_operands(float* at, float first, float second) {
        store_values(at, operand(first), operand(second));
    }
    static __device__ __forceinline__ void store_operands(float* at, const float (&four)[4]) {
        store_vector(at, make_float4(operand(four[0]), operand(four[1]), operand(four[2]),
                                     operand(four[3])));
    }
};

template <DataType kType_>
struct HalfMath {
    using Elem = std::uint16_t;
    static constexpr DataType kType = kType_;
    static constexpr std::uint32_t kOne = kType == DataType::bfloat16 ? 0x3f80u : 0x3c00u;
    static __device__ __forceinline__ std::uint32_t pack(float low, float high) {
        return kType == DataType::bfloat16 ? pack_bf16(low, high) : pack_f16(low, high);
    }
    static __device__ __forceinline__ void multiply(float (&d)[4], const std::uint32_t (&a)[4],
                                                    const std::uint32_t (&b)[2]) {
        if constexpr (kType == DataType::bfloat16) {
            mma_bf16(d, a, b);
        } else {
            mma_f16(d, a, b);
        }
    }
    static __device__ __forceinline__ float load(Elem bits) {
        return kType == DataType::bfloat16 ? narrow::from_bfloat16(bits) : f16_value(bits);
    }
    static __device__ __forceinline__ Elem value(float sum) {
        return static_cast<Elem>(pack(sum, 0.0f));
    }
    static __device__ __forceinline__ Elem operand(float value_) { return value(value_); }
    static __device__ __forceinline__ float4 load4(const Elem* at) {
        return unpack4(load_vector<uint2>(at));
    }
    static __device__ __forceinline__ void store4(Elem* at, const float4& values) {
        store_vector(at, pack4(values));
    }
    static __device__ __forceinline__ float4 rounded4(const float4& values) {
        return unpack4(pack4(values));
    }
    static __device__ __forceinline__ void store_values(Elem* at, float first, float second) {
        store_vector(at, pack(first, second));
    }
    static __device__ __forceinline__ void store_operands(Elem* at, float first, float second) {
        store_values(at, first, second);
    }
    static __device__ __forceinline__ void store_operands(Elem* at, const float (&four)[4]) {
        store4(at, make_float4(four[0], four[1], four[2], four[3]));
    }

 private:
    static __device__ __forceinline__ uint2 pack4(const float4& values) {
        uint2 words;
        words.x = pack(values.x, values.y);
        words.y = pack(values.z, values.w);
        return words;
    }
    static __device__ __forceinline__ float4 unpack4(const uint2& words) {
        const auto low = [](std::uint32_t two) { return load(static_cast<Elem>(two)); };
        const auto high = [](std::uint32_t two) { return load(static_cast<Elem>(two >> 16)); };
        return make_float4(low(words.x), high(words.x), low(words.y), high(words.y));
    }
};
using Bf16Math = HalfMath<DataType::bfloat16>;
using F16Math = HalfMath<DataType::float16>;

// Rounds a float as values in memory are; for example, a layer's fp32 weight as a 16-bit factor.
template <typename Math>
__device__ __forceinline__ float rounded(float value) {
    return Math::load(Math::value(value));
}

// Creates Made<Math> for values of `type`.
template <template <typename> typename Made, typename Base = Op, typename... Args>
std::unique_ptr<Base> make_for_math(DataType type, const Args&... args) {
    switch (type) {
        case DataType::bfloat16:
            return std::make_unique<Made<Bf16Math>>(args...);
        case DataType::float16:
            return std::make_unique<Made<F16Math>>(args...);
        case DataType::float32:
            break;
    }
    return std::make_unique<Made<Tf32Math>>(args...);
}

}  // namespace gyre::SIMT_NAMESPACE
