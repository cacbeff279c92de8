// The operands of operations: their values, and several copies to rotate over.
// Part of bench/kernels_gpu.cpp, compiled for GPUs and for the emulator like it.
#pragma once

#include <cstring>
#include <limits>
#include <random>
#include <string>

#include "bench/gpu_calls.hpp"

namespace gyre::SIMT_NAMESPACE {

enum class Type { f32, i32, u8 };
enum class Role { in, out, in_out, scratch };
enum class Values { any, positive, labels, samples };

struct Operand {
    Role role = Role::in;
    Type type = Type::f32;
    Values values = Values::any;
    Shape shape;
    bool batched = false;  // an activation [n][shape] (i32: [n]); otherwise [shape] for any batch
    bool ours_alone = false;  // an output that the library's operation lacks

    std::int64_t elems(int n) const { return shape.elems() * (batched ? n : 1); }
    std::size_t bytes(int n) const {
        return static_cast<std::size_t>(elems(n)) * (type == Type::u8 ? 1 : 4);
    }
    bool is_output() const { return role == Role::out || role == Role::in_out; }
    bool is_input() const { return role == Role::in || role == Role::in_out; }
};
inline Operand images(Role role, const Shape& shape) {
    return {role, Type::f32, Values::any, shape, true};
}
inline Operand vector(Role role, std::int64_t elems, Values values = Values::any) {
    return {role, Type::f32, values, {1, 1, static_cast<int>(elems)}};
}
inline Operand indices(Values values) {
    return {Role::in, Type::i32, values, {1, 1, 1}, true};
}

struct Args {
    int n = 0;
    bool timed = false;  // if set, values must stay normal numbers, call after call
    std::vector<void*> at;

    Batch batch() const { return {.n = n, .training = true}; }
    float* f(std::size_t i) const { return static_cast<float*>(at[i]); }
    std::int32_t* i32(std::size_t i) const { return static_cast<std::int32_t*>(at[i]); }
    std::uint8_t* u8(std::size_t i) const { return static_cast<std::uint8_t*>(at[i]); }
};

// Random values on the device that operands are copied from. Operands differ every time, as the
// number of values is prime and an operand starts where the last one ended. No two values are
// equal, so that everybody finds the same maximum in a window of max-pooling.
class ValuePool {
 public:
    explicit ValuePool(Stream& stream) : stream_(stream) {
        std::vector<float> values(static_cast<std::size_t>(kPool));
        for (std::size_t i = 0; i < values.size(); ++i) {
            values[i] = (2.0f * static_cast<float>(i) + 1.0f) / static_cast<float>(kPool) - 1.0f;
        }
        std::shuffle(values.begin(), values.end(), random_);
        any_ = upload(values);
        std::transform(values.begin(), values.end(), values.begin(),
                       [](float v) { return std::abs(v) + 0.01f; });
        positive_ = upload(values);
        std::fill(values.begin(), values.end(), std::numeric_limits<float>::quiet_NaN());
        poison_ = upload(values);
    }
    ~ValuePool() {
        release(any_);
        release(positive_);
        release(poison_);
    }
    ValuePool(const ValuePool&) = delete;
    ValuePool& operator=(const ValuePool&) = delete;

    void fill(const Operand& operand, int n, void* to) {
        if (operand.type == Type::i32) {
            const int end = operand.values == Values::labels ? 10 : kDatasetImages;
            std::uniform_int_distribution<std::int32_t> distribution(0, end - 1);
            std::vector<std::int32_t> values(static_cast<std::size_t>(operand.elems(n)));
            std::generate(values.begin(), values.end(), [&] { return distribution(random_); });
            stream_.upload(to, values.data(), operand.bytes(n));
            stream_.synchronize();
        } else {
            copy(operand.values == Values::positive ? positive_ : any_, operand.bytes(n), to);
        }
    }
    void poison(const Operand& operand, int n, void* to) { copy(poison_, operand.bytes(n), to); }

 private:
    float* upload(const std::vector<float>& values) {
        auto* memory = static_cast<float*>(allocate(values.size() * sizeof(float)));
        stream_.upload(memory, values.data(), values.size() * sizeof(float));
        stream_.synchronize();
        return memory;
    }
    void copy(const float* pool, std::size_t bytes, void* to) {
        const std::size_t size = static_cast<std::size_t>(kPool) * sizeof(float);
        for (std::size_t done = 0; done < bytes;) {
            const std::size_t part = std::min(bytes - done, size - cursor_);
            stream_.copy(static_cast<char*>(to) + done,
                         reinterpret_cast<const char*>(pool) + cursor_, part);
            done += part;
            cursor_ = (cursor_ + (part + 3) / 4 * 4) % size;
        }
    }

    Stream& stream_;
    std::mt19937 random_{2026};
    float *any_ = nullptr, *positive_ = nullptr, *poison_ = nullptr;
    std::size_t cursor_ = 0;  // bytes
};

// Several copies of an operation's operands in one allocation, filled with values.
class OperandSets {
 public:
    OperandSets(ValuePool& pool, const std::vector<Operand>& operands, int n, std::size_t sets)
        : memory_(static_cast<char*>(allocate(set_bytes(operands, n) * sets))) {
        char* at = memory_;
        for (std::size_t set = 0; set < sets; ++set) {
            Args args;
            args.n = n;
            for (const Operand& operand : operands) {
                args.at.push_back(at);
                pool.fill(operand, n, at);
                at += padded(operand.bytes(n));
            }
            sets_.push_back(std::move(args));
        }
    }
    ~OperandSets() { release(memory_); }
    OperandSets(const OperandSets&) = delete;
    OperandSets& operator=(const OperandSets&) = delete;

    std::vector<Args>& sets() { return sets_; }

    static std::size_t set_bytes(const std::vector<Operand>& operands, int n) {
        std::size_t sum = 0;
        for (const Operand& operand : operands) {
            sum += padded(operand.bytes(n));
        }
        return sum;
    }

 private:
    static std::size_t padded(std::size_t bytes) {
        return (bytes + kOperandAlignment - 1) / kOperandAlignment * kOperandAlignment;
    }

    char* const memory_;
    std::vector<Args> sets_;
};

}  // namespace gyre::SIMT_NAMESPACE
