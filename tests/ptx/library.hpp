// The PTX of all kernels for one architecture.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "tests/ptx/module.hpp"

namespace gyre::ptx {

struct Entry {
    const Module* module = nullptr;
    std::string mangled;
};

class Library {
 public:
    // The files of a folder, whose last name is that of the architecture.
    explicit Library(const std::string& folder);
    // A copy in which each line of one file that has `part` in it is changed. Throws Error if there
    // is no such line.
    Library(const Library& other, const std::string& file, const std::string& part,
            const std::function<void(std::string& line)>& change);

    const std::string& architecture() const { return architecture_; }
    // All kernels, by their names in C++.
    const std::multimap<std::string, Entry>& entries() const { return entries_; }
    // The kernel that this function of the emulator stands for. Throws Error if there is none, or
    // several.
    const Entry& find(const void* function) const;
    // The kernel of this name in C++; null if there is none. source: preferred if several files
    // have kernels of this name, and may be empty.
    const Entry* find(const std::string& name, const std::string& source) const;

 private:
    void add(std::shared_ptr<const Module> module);

    std::string architecture_;
    std::vector<std::shared_ptr<const Module>> modules_;
    std::multimap<std::string, Entry> entries_;
    mutable std::map<const void*, const Entry*> found_;
};

// The name in C++ that the kernel of a function of the emulator has.
std::string kernel_name(const void* function);

}  // namespace gyre::ptx
