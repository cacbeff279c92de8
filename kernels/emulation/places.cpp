#include "kernels/emulation/places.hpp"

#include <fmt/format.h>
#include <link.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>

namespace simt {

std::uintptr_t program_begin() {
    static const std::uintptr_t begin = [] {
        std::uintptr_t address = 0;
        dl_iterate_phdr(
            [](dl_phdr_info* info, std::size_t, void* to) {
                *static_cast<std::uintptr_t*>(to) = info->dlpi_addr;
                return 1;  // the program is listed before its libraries
            },
            &address);
        return address;
    }();
    return begin;
}

void lines_of(const std::string& arguments, gyre::FunctionRef<void(const std::string&)> line) {
    std::array<char, 4096> text{};
    if (readlink("/proc/self/exe", text.data(), text.size() - 1) <= 0) {
        return;
    }
    const std::string file = fmt::format("'{}'", text.data());
    const std::string command = fmt::format(fmt::runtime(arguments), file) + " 2>/dev/null";
    FILE* const pipe = popen(command.c_str(), "r");
    if (pipe == nullptr) {
        return;
    }
    char* begin = nullptr;
    std::size_t capacity = 0;
    for (ssize_t length; (length = getline(&begin, &capacity, pipe)) > 0;) {
        line(std::string(begin, static_cast<std::size_t>(length) - (begin[length - 1] == '\n')));
    }
    std::free(begin);
    pclose(pipe);
}

std::string place_of(std::uint32_t return_address, int most) {
    std::string places;
    int listed = 0;
    // This is the return address; the call itself may be the last instruction of its line.
    lines_of(fmt::format("addr2line -i -e {{}} {:#x}", return_address - 1), [&](std::string line) {
        line.erase(std::min(line.find_first_of(" \n"), line.size()));
        const bool helper = line.find("??") != line.npos || line.rfind("/usr/", 0) == 0 ||
                            line.find("emulation/simt.hpp:") != line.npos;
        if (!helper && listed < most) {
            places += (listed++ > 0 ? ", called from " : "") + line;
        }
    });
    return listed > 0 ? places : fmt::format("{:#x} of the program", return_address);
}

std::string function_at(const void* entry) {
    std::string name;
    lines_of(fmt::format("addr2line -f -C -e {{}} {:#x}",
                         reinterpret_cast<std::uintptr_t>(entry) - program_begin()),
             [&](const std::string& line) {
                 if (name.empty() && line.find("??") == line.npos) {
                     name = line;
                 }
             });
    return name;
}

}  // namespace simt
