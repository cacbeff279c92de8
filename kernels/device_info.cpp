#include "kernels/device_info.hpp"

#include <fmt/format.h>

#include <fstream>
#include <thread>

#include "kernels/choose_cpu_kernels.hpp"

namespace gyre {
namespace {

std::string processor_name() {
    std::ifstream in("/proc/cpuinfo");
    for (std::string line; std::getline(in, line);) {
        const auto colon = line.find(": ");
        if (line.starts_with("model name") && colon != std::string::npos) {
            return line.substr(colon + 2);
        }
    }
    return "an unnamed processor";
}

std::string instruction_sets() {
    const CpuKernels& chosen = chosen_cpu_kernels();
    std::string others;
    for (const CpuKernels* set : available_cpu_kernels()) {
        others += set == &chosen ? "" : fmt::format("{}{}", others.empty() ? "" : ", ", set->name);
    }
    return fmt::format("{}, {} floats{}", chosen.title, chosen.vector_floats,
                       others.empty() ? "" : "; GYRE_CPU chooses others: " + others);
}

}  // namespace

std::vector<InfoLine> device_info() {
    std::vector<InfoLine> lines = {{"compiler", fmt::format("g++ or compatible, {}", __VERSION__)},
                                   {"processor", fmt::format("{}, {} threads", processor_name(),
                                                             std::thread::hardware_concurrency())},
                                   {"vectors", instruction_sets()}};
    for (InfoLine& line : cuda_info()) {
        lines.push_back(std::move(line));
    }
    return lines;
}

#if !defined(GYRE_HAVE_CUDA)
std::vector<InfoLine> cuda_info() {
    return {{"CUDA", "not in this build (no toolkit was found, or GYRE_CUDA=OFF)"}};
}
#endif

}  // namespace gyre
