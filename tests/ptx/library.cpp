#include "tests/ptx/library.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>

#include "tests/ptx/symbols.hpp"

namespace gyre::ptx {
namespace {

std::string stem(const std::string& file) {
    return file.substr(0, file.find('.'));
}

}  // namespace

Library::Library(const std::string& folder)
    : architecture_(std::filesystem::path(folder).filename().string()) {
    for (const auto& file : std::filesystem::directory_iterator(folder)) {
        if (file.path().extension() == ".ptx") {
            add(std::make_shared<Module>(Module::read(file.path().string())));
        }
    }
    if (entries_.empty()) {
        refuse(folder + ": no kernel in the .ptx files there");
    }
}

Library::Library(const Library& other, const std::string& file, const std::string& part,
                 const std::function<void(std::string& line)>& change)
    : architecture_(other.architecture_) {
    std::size_t count = 0;
    for (const auto& module : other.modules_) {
        if (module->name() != file) {
            add(module);
            continue;
        }
        std::string text = module->text();
        for (std::size_t at = 0; (at = text.find(part, at)) != std::string::npos; ++count) {
            const std::size_t begin = text.rfind('\n', at) + 1;
            const std::size_t end = std::min(text.find('\n', at), text.size());
            std::string line = text.substr(begin, end - begin);
            change(line);
            text.replace(begin, end - begin, line);
            at = begin + line.size();
        }
        add(std::make_shared<Module>(module->name(), std::move(text)));
    }
    if (count == 0) {
        refuse(fmt::format("{}: nowhere '{}'", file, part));
    }
}

void Library::add(std::shared_ptr<const Module> module) {
    for (const std::string& entry : module->entries()) {
        entries_.emplace(demangled(entry), Entry{module.get(), entry});
    }
    modules_.push_back(std::move(module));
}

const Entry* Library::find(const std::string& name, const std::string& source) const {
    const auto [first, last] = entries_.equal_range(name);
    const Entry* result = nullptr;
    for (auto each = first; each != last; ++each) {
        if (stem(each->second.module->name()) == stem(source)) {
            return &each->second;
        }
        if (result != nullptr && result->mangled != each->second.mangled) {
            refuse(fmt::format("several kernels are called {}", name));
        }
        result = &each->second;
    }
    return result;
}

const Entry& Library::find(const void* function) const {
    const Entry*& entry = found_[function];
    if (entry == nullptr) {
        const std::string name = kernel_name(function);
        entry = find(name, function_at(function).source);
        if (entry == nullptr) {
            refuse(fmt::format("no PTX of {}", name));
        }
    }
    return *entry;
}

std::string kernel_name(const void* function) {
    const std::string from = "gyre::emulated::", to = "gyre::cuda::";
    std::string name = demangled(function_at(function).name);
    for (std::size_t at = 0; (at = name.find(from, at)) != std::string::npos; at += to.size()) {
        name.replace(at, from.size(), to);
    }
    return name;
}

}  // namespace gyre::ptx
