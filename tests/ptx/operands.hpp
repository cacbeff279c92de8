// The names in a kernel's text, and the places in a warp's registers that they stand for.
#pragma once

#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "tests/ptx/module.hpp"

namespace gyre::ptx {

// "a, {b, c}, [d+4]" in parts, without spaces; commas in brackets divide nothing.
std::vector<std::string> split_operands(const std::string& text);

class Operands {
 public:
    Operands(const Module& module, Kernel& kernel) : module_(module), kernel_(kernel) {}

    // A register of 4 or 8 bytes for the name; a later one of the same name, in an inner scope,
    // takes its place.
    void declare_register(const std::string& name, std::size_t bytes);
    // A parameter of a call: a register of 8 bytes.
    void declare_call_parameter(const std::string& name);
    void declare_shared(const Declaration& variable);

    // The place of a register, number, parameter, or variable that holds as many bytes.
    std::int32_t place(const std::string& name, std::size_t bytes);
    // The place of a register of whatever width.
    std::int32_t place_of_any(const std::string& name, std::size_t bytes);
    // The place of a parameter of a call; empty if the name is none.
    std::optional<std::int32_t> call_parameter(const std::string& name) const;
    bool is_wide_register(const std::string& name) const;
    std::int32_t unnamed_register(std::size_t bytes);

 private:
    struct Register {
        std::int32_t at;
        bool wide;
    };
    std::int32_t constant(std::uint64_t bits, bool wide);
    std::int32_t number(const std::string& text, bool wide);
    std::optional<std::int32_t> variable(const std::string& name, bool wide);
    std::uint32_t place_shared(const std::string& name, std::size_t alignment, std::size_t bytes);

    const Module& module_;
    Kernel& kernel_;
    std::unordered_map<std::string, Register> registers_;
    std::unordered_map<std::string, std::int32_t> call_parameters_;
    std::unordered_map<std::string, std::int32_t> constants_;
    std::unordered_map<std::string, std::uint32_t> shared_;  // addresses
};

}  // namespace gyre::ptx
