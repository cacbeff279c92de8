#include "kernels/emulation/source_place.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdio>

namespace gyre::emulated {

std::string source_place(std::uint32_t pc) {
    std::array<char, 4096> text{};
    if (readlink("/proc/self/exe", text.data(), text.size() - 1) <= 0) {
        return fmt::format("{:#x}", pc);
    }
    // The address is where the call returns to; the call itself may be the end of a line.
    const std::string command =
        fmt::format("addr2line -i -e '{}' {:#x} 2>/dev/null", text.data(), pc - 1);
    std::string places;
    int listed = 0;
    if (FILE* pipe = popen(command.c_str(), "r")) {
        while (std::fgets(text.data(), static_cast<int>(text.size()), pipe) != nullptr) {
            std::string line = text.data();
            line.erase(std::min(line.find_first_of(" \n"), line.size()));
            const bool helper = line.find("??") != line.npos || line.rfind("/usr/", 0) == 0 ||
                                line.find("emulation/simt.hpp:") != line.npos;
            if (!helper && listed < 3) {
                places += (listed++ > 0 ? ", called from " : "") + line;
            }
        }
        pclose(pipe);
    }
    return listed > 0 ? places : fmt::format("{:#x} of the program", pc);
}

}  // namespace gyre::emulated
