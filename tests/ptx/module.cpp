#include "tests/ptx/module.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <sstream>

namespace gyre::ptx {

std::size_t type_bytes(const std::string& type) {
    if (type == "pred" || type == "f16x2" || type == "bf16x2" || type == "tf32") {
        return 4;
    }
    if (type == "f16" || type == "bf16") {
        return 2;
    }
    if (type.size() < 2 || std::string("busf").find(type[0]) == std::string::npos) {
        return 0;
    }
    const std::string bits = type.substr(1);
    return bits == "8" ? 1 : bits == "16" ? 2 : bits == "32" ? 4 : bits == "64" ? 8 : 0;
}

Declaration parse_declaration(const std::string& text) {
    Declaration result;
    std::istringstream words(text.substr(0, text.find(';')));
    std::size_t element = 0;
    for (std::string word; words >> word;) {
        if (word == ".align") {
            words >> result.alignment;
        } else if (word[0] != '.') {
            result.name = word;
        } else if (const std::size_t bytes = type_bytes(word.substr(1)); bytes > 0) {
            element = bytes;
        }
    }
    if (!result.name.empty() && result.name.back() == ',') {
        result.name.pop_back();
    }
    result.bytes = element;
    if (const std::size_t bracket = result.name.find('['); bracket != std::string::npos) {
        result.bytes *= std::strtoull(result.name.c_str() + bracket + 1, nullptr, 10);
        result.name.resize(bracket);
    }
    if (element == 0 || result.name.empty()) {
        refuse("PTX: a declaration without type or name: " + text);
    }
    if (result.alignment == 0) {
        result.alignment = element;
    }
    return result;
}

Module Module::read(const std::string& path) {
    std::ifstream in(path, std::ios::binary);
    std::ostringstream text;
    text << in.rdbuf();
    if (!in || text.str().empty()) {
        refuse(path + ": cannot be read, or is empty");
    }
    const std::size_t slash = path.rfind('/');
    return Module(slash == std::string::npos ? path : path.substr(slash + 1), text.str());
}

Module::Module(std::string name, std::string text)
    : name_(std::move(name)), text_(std::move(text)) {
    constexpr const char* kEntry = ".entry ";
    std::string entry;
    std::size_t begin = 0;
    for (std::size_t at = 0; at < text_.size();) {
        const std::size_t end = std::min(text_.find('\n', at), text_.size());
        const std::string line = text_.substr(at, end - at);
        if (const std::size_t found = line.find(kEntry);
            entry.empty() && found != std::string::npos && line[0] == '.') {
            const std::size_t first = found + std::string(kEntry).size();
            entry = line.substr(first, line.find('(') - first);
            begin = at + first + entry.size();
        } else if (entry.empty()) {
            read_line(line);
        } else if (line == "}") {
            entries_.push_back(entry);
            extents_[entry] = {begin, at};
            entry.clear();
        }
        at = end + 1;
    }
}

void Module::read_line(const std::string& line) {
    const auto begins = [&](const char* with) { return line.rfind(with, 0) == 0; };
    if (begins(".shared ") || begins(".extern .shared ")) {
        const Declaration variable = parse_declaration(line);
        shared_[variable.name] = {variable.alignment, variable.bytes, begins(".extern")};
    } else if (begins(".global ") || begins(".const ") || begins(".visible .global ")) {
        read_global(line);
    } else if (const std::size_t file = line.find(".file"); file == 0 || file == 1) {
        const std::size_t quote = line.find('"');
        std::string path = line.substr(quote + 1, line.find('"', quote + 1) - quote - 1);
        if (const std::size_t room = path.rfind("kernels/"); room != std::string::npos) {
            path.erase(0, room);
        }
        sources_[static_cast<std::uint32_t>(std::strtoul(line.c_str() + file + 5, nullptr, 10))] =
            path;
    }
}

void Module::read_global(const std::string& line) {
    const std::size_t equals = line.find(" = ");
    const Declaration variable = parse_declaration(line.substr(0, equals));
    global_memory_.push_back(std::make_unique<std::uint64_t[]>(variable.bytes / 8 + 3));
    auto* const bytes = reinterpret_cast<std::uint8_t*>(
        (reinterpret_cast<std::uintptr_t>(global_memory_.back().get()) + 15) / 16 * 16);
    globals_[variable.name] = {reinterpret_cast<std::uintptr_t>(bytes), variable.bytes};
    if (equals == std::string::npos) {
        return;
    }
    if (line.find(" .b8 ") == std::string::npos) {
        refuse(fmt::format("{}: initial values that are not bytes: {}", name_, line));
    }
    const char* at = line.c_str() + line.find('{') + 1;
    for (std::size_t i = 0; i < variable.bytes && *at != '}'; ++i) {
        char* after = nullptr;
        bytes[i] = static_cast<std::uint8_t>(std::strtol(at, &after, 0));
        at = *after == ',' ? after + 1 : after;
    }
}

const Kernel& Module::kernel(const std::string& entry) const {
    std::unique_ptr<Kernel>& kernel = kernels_[entry];
    if (kernel == nullptr) {
        const auto found = extents_.find(entry);
        if (found == extents_.end()) {
            refuse(fmt::format("{}: no kernel {}", name_, entry));
        }
        const auto [begin, end] = found->second;
        kernel = parse_kernel(*this, entry, text_.substr(begin, end - begin));
    }
    return *kernel;
}

std::string Module::body(const std::string& entry) const {
    const auto [begin, end] = extents_.at(entry);
    std::istringstream lines(text_.substr(begin, end - begin));
    std::string result;
    for (std::string line; std::getline(lines, line);) {
        const std::size_t first = line.find_first_not_of(" \t");
        // Labels of lines are numbered over all of the file.
        if (first != std::string::npos && line.compare(first, 4, ".loc") != 0 &&
            line.compare(first, 2, "//") != 0 && line.compare(first, 7, "$L__tmp") != 0) {
            result.append(line).push_back('\n');
        }
    }
    // Names of unnamed namespaces have hashes in them that depend on the architecture.
    for (const std::string before : {"_GLOBAL__N__", "_INTERNAL_", "_cu_"}) {
        constexpr std::size_t kDigits = 8;
        for (std::size_t at = 0; (at = result.find(before, at)) != std::string::npos;) {
            at += before.size();
            result.replace(at, std::min(kDigits, result.size() - at), kDigits, 'x');
        }
    }
    return result;
}

std::string Module::source(std::uint32_t number) const {
    const auto found = sources_.find(number);
    return found == sources_.end() ? "no source" : found->second;
}

const Module::Shared* Module::shared(const std::string& name) const {
    const auto found = shared_.find(name);
    return found == shared_.end() ? nullptr : &found->second;
}

}  // namespace gyre::ptx
