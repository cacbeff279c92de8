#include "tests/ptx/operands.hpp"

#include <fmt/format.h>

#include <cctype>
#include <cstdlib>

#include "tests/ptx/warp.hpp"

namespace gyre::ptx {

std::vector<std::string> split_operands(const std::string& text) {
    std::vector<std::string> parts;
    std::string part;
    int depth = 0;
    for (const char c : text) {
        depth += c == '{' || c == '[' || c == '(';
        depth -= c == '}' || c == ']' || c == ')';
        if (c == ',' && depth == 0) {
            parts.push_back(part);
            part.clear();
        } else if (std::isspace(static_cast<unsigned char>(c)) == 0) {
            part += c;
        }
    }
    if (!part.empty()) {
        parts.push_back(part);
    }
    return parts;
}

std::int32_t Operands::unnamed_register(std::size_t bytes) {
    const std::size_t at = kernel_.register_bytes;
    kernel_.register_bytes += kLanes * (bytes == 8 ? 8 : 4);
    return static_cast<std::int32_t>(at);
}
void Operands::declare_register(const std::string& name, std::size_t bytes) {
    registers_[name] = {unnamed_register(bytes), bytes == 8};
}
void Operands::declare_call_parameter(const std::string& name) {
    call_parameters_[name] = unnamed_register(8);
}
void Operands::declare_shared(const Declaration& variable) {
    place_shared(variable.name, variable.alignment, variable.bytes);
}

std::int32_t Operands::place(const std::string& name, std::size_t bytes) {
    const auto found = registers_.find(name);
    if (found != registers_.end() && found->second.wide != (bytes == 8)) {
        refuse(fmt::format("the register {} has another width than {} bytes", name, bytes));
    }
    return place_of_any(name, bytes);
}

std::int32_t Operands::place_of_any(const std::string& name, std::size_t bytes) {
    if (name.empty()) {
        refuse("an operand is missing");
    }
    if (const auto found = registers_.find(name); found != registers_.end()) {
        return found->second.at;
    }
    if (name == "_") {  // a result that nobody wants
        return unnamed_register(bytes);
    }
    if (name[0] == '%') {
        const auto [found, is_new] = kernel_.special_registers.try_emplace(name, 0);
        if (is_new) {
            found->second = unnamed_register(4);
        }
        return found->second;
    }
    const bool wide = bytes == 8;
    if (std::isdigit(static_cast<unsigned char>(name[0])) != 0 || name[0] == '-') {
        return number(name, wide);
    }
    if (const auto found = variable(name, wide)) {
        return *found;
    }
    refuse("an unknown operand: " + name);
}

std::optional<std::int32_t> Operands::call_parameter(const std::string& name) const {
    const auto found = call_parameters_.find(name);
    return found == call_parameters_.end() ? std::nullopt : std::optional(found->second);
}

bool Operands::is_wide_register(const std::string& name) const {
    const auto found = registers_.find(name);
    return found != registers_.end() && found->second.wide;
}

std::int32_t Operands::constant(std::uint64_t bits, bool wide) {
    const auto [found, is_new] =
        constants_.try_emplace(fmt::format("{}.{}", bits, wide ? 64 : 32), 0);
    if (is_new) {
        found->second = unnamed_register(wide ? 8 : 4);
        kernel_.constants.push_back({found->second, wide, bits});
    }
    return found->second;
}

std::int32_t Operands::number(const std::string& text, bool wide) {
    const char* const digits = text.c_str();
    if (text.size() > 2 && text[0] == '0' && std::string("fFdD").find(text[1]) != text.npos) {
        return constant(std::strtoull(digits + 2, nullptr, 16), text[1] == 'd' || text[1] == 'D');
    }
    char* end = nullptr;
    const std::uint64_t bits = text[0] == '-'
                                   ? static_cast<std::uint64_t>(std::strtoll(digits, &end, 0))
                                   : std::strtoull(digits, &end, 0);
    if (*end != 0 && *end != 'U') {
        refuse("an unknown number: " + text);
    }
    return constant(wide ? bits : bits & 0xffffffffu, wide);
}

std::optional<std::int32_t> Operands::variable(const std::string& name, bool wide) {
    for (const Kernel::Parameter& parameter : kernel_.parameters) {
        if (parameter.name == name) {
            const std::int32_t at = unnamed_register(8);
            kernel_.parameter_addresses.emplace_back(at, parameter.offset);
            return at;
        }
    }
    if (const auto found = shared_.find(name); found != shared_.end()) {
        return constant(found->second, wide);
    }
    if (const Module::Shared* const shared = module_.shared(name)) {
        if (!shared->dynamic) {
            return constant(place_shared(name, shared->alignment, shared->bytes), wide);
        }
        kernel_.dynamic_shared = true;
        const std::int32_t at = unnamed_register(wide ? 8 : 4);
        kernel_.dynamic_addresses.emplace_back(at, wide);
        return at;
    }
    if (const auto found = module_.globals().find(name); found != module_.globals().end()) {
        return constant(found->second.first, true);
    }
    return {};
}

std::uint32_t Operands::place_shared(const std::string& name, std::size_t alignment,
                                     std::size_t bytes) {
    const std::size_t at = (kernel_.shared_bytes + alignment - 1) / alignment * alignment;
    kernel_.shared_bytes = static_cast<std::uint32_t>(at + bytes);
    return shared_[name] = kSharedBegin + static_cast<std::uint32_t>(at);
}

}  // namespace gyre::ptx
