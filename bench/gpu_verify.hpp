// The reference of a verification: operands on the CPU, and the distance between results.
// Part of bench/kernels_gpu.cpp, compiled for GPUs and for the emulator like it.
#pragma once

#include "bench/gpu_operations.hpp"

namespace gyre::SIMT_NAMESPACE {

using Host = std::vector<std::byte>;
using Numbers = std::vector<double>;

template <typename T>
inline void append(const Host& from, Numbers& to) {
    for (std::size_t i = 0; i + sizeof(T) <= from.size(); i += sizeof(T)) {
        T value;
        std::memcpy(&value, from.data() + i, sizeof(T));
        to.push_back(static_cast<double>(value));
    }
}
inline Numbers numbers(Type type, const Host& from) {
    Numbers values;
    switch (type) {
        case Type::f32:
            append<float>(from, values);
            break;
        case Type::i32:
            append<std::int32_t>(from, values);
            break;
        case Type::u8:
            append<std::uint8_t>(from, values);
            break;
    }
    return values;
}

// Returns infinity if any value, found or expected, is not a number.
inline double relative_error(const Numbers& found, const Numbers& expected) {
    double difference = 0.0, norm = 0.0;
    for (std::size_t i = 0; i < expected.size(); ++i) {
        difference += (found[i] - expected[i]) * (found[i] - expected[i]);
        norm += expected[i] * expected[i];
    }
    const double error = std::sqrt(difference / std::max(norm, 1e-30));
    return std::isfinite(error) ? error : std::numeric_limits<double>::infinity();
}

// The operands of one call on the CPU backend, which may lay out activations differently.
class CpuOperands {
 public:
    CpuOperands(Backend& cpu, const std::vector<Operand>& operands, int n,
                const std::vector<Host>& values)
        : cpu_(cpu), operands_(operands) {
        args_.n = n;
        for (std::size_t i = 0; i < operands.size(); ++i) {
            const Operand& operand = operands[i];
            const std::size_t elems =
                is_activation(operand)
                    ? static_cast<std::size_t>(cpu.activation_elems(operand.shape, n))
                    : static_cast<std::size_t>(operand.elems(n));
            const auto bytes = static_cast<std::int64_t>(
                operand.bytes(n) / static_cast<std::size_t>(operand.elems(n)) * elems);
            buffers_.emplace_back(cpu, bytes);
            void* const memory = buffers_.back().get();
            args_.at.push_back(memory);
            if (operand.is_input() && is_activation(operand)) {
                cpu.import_activation(operand.shape, n,
                                      reinterpret_cast<const float*>(values[i].data()), args_.f(i));
            } else if (operand.is_input()) {
                std::memcpy(memory, values[i].data(), values[i].size());
            }
        }
    }
    const Args& args() const { return args_; }
    Numbers read(std::size_t i) {
        const Operand& operand = operands_[i];
        Host host(operand.bytes(args_.n));
        if (is_activation(operand)) {
            cpu_.export_activation(operand.shape, args_.n, args_.f(i),
                                   reinterpret_cast<float*>(host.data()));
        } else {
            std::memcpy(host.data(), args_.at[i], host.size());
        }
        return numbers(operand.type, host);
    }

 private:
    static bool is_activation(const Operand& operand) {
        return operand.batched && (operand.type == Type::f32 || operand.type == Type::u8);
    }

    Backend& cpu_;
    const std::vector<Operand>& operands_;
    std::vector<DeviceBuffer<std::byte>> buffers_;
    Args args_;
};

}  // namespace gyre::SIMT_NAMESPACE
