// Tensors of any type, between guards.
#pragma once

#include <cstring>
#include <vector>

#include "tests/support/backends.hpp"

namespace gyre::test {

inline std::uint16_t narrowed(DataType type, float value) {
    return type == DataType::bfloat16 ? narrow::to_bfloat16(value) : narrow::to_float16(value);
}
inline float widened(DataType type, std::uint16_t value) {
    return type == DataType::bfloat16 ? narrow::from_bfloat16(value) : narrow::from_float16(value);
}
// Rounds values as a tensor of this type stores them.
inline Floats rounded(DataType type, Floats values) {
    for (float& value : values) {
        value = type == DataType::float32 ? value : widened(type, narrowed(type, value));
    }
    return values;
}

class TypedValues {
 public:
    TypedValues(Bench& bench, DataType type, const Floats& values)
        : type_(type), elems_(values.size()), memory_(bench.vector(packed(type, values))) {}
    Tensor tensor() const { return {memory_.get(), type_}; }
    Floats read() const {
        Floats values = memory_.download();
        if (type_ != DataType::float32) {
            std::vector<std::uint16_t> bits(2 * values.size());
            copy_bytes(bits.data(), values.data(), values.size() * sizeof(float));
            values.resize(elems_);
            for (std::size_t i = 0; i < elems_; ++i) {
                values[i] = widened(type_, bits[i]);
            }
        }
        return values;
    }

 private:
    // bytes may be 0, with null addresses, which memcpy forbids.
    static void copy_bytes(void* to, const void* from, std::size_t bytes) {
        if (bytes > 0) {
            std::memcpy(to, from, bytes);
        }
    }
    // Packs 16-bit values in pairs, as the words of floats.
    static Floats packed(DataType type, const Floats& values) {
        if (type == DataType::float32) {
            return values;
        }
        std::vector<std::uint16_t> bits((values.size() + 1) / 2 * 2);
        for (std::size_t i = 0; i < values.size(); ++i) {
            bits[i] = narrowed(type, values[i]);
        }
        Floats words(bits.size() / 2);
        copy_bytes(words.data(), bits.data(), words.size() * sizeof(float));
        return words;
    }
    DataType type_;
    std::size_t elems_;
    Guarded memory_;
};

}  // namespace gyre::test
