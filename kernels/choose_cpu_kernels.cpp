#include "kernels/choose_cpu_kernels.hpp"

#include <fmt/format.h>

#include <cstdlib>

#include "base/error.hpp"

// The only symbol that each instruction set's object exports. GYRE_CPU_SETS is X(avx512) and so on,
// best first (kernels/CMakeLists.txt).
#define X(set) extern "C" const gyre::CpuKernels gyre_cpu_##set;
GYRE_CPU_SETS
#undef X

namespace gyre {
namespace {

bool has(const std::string& set) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    // x86-64-v4, x86-64-v3 and x86-64-v2, which is gyre's minimum.
    if (set == "avx512") {
        return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
               __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
               __builtin_cpu_supports("avx512vl") && has("avx2");
    }
    if (set == "avx2") {
        return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
               __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2");
    }
#endif
    return !set.empty();
}

std::string names(const std::vector<const CpuKernels*>& sets) {
    std::string text;
    for (const CpuKernels* set : sets) {
        text += fmt::format("{}{}", text.empty() ? "" : ", ", set->name);
    }
    return text;
}

}  // namespace

std::vector<const CpuKernels*> available_cpu_kernels() {
    std::vector<const CpuKernels*> sets;
#define X(set)                           \
    if (has(gyre_cpu_##set.name)) {      \
        sets.push_back(&gyre_cpu_##set); \
    }
    GYRE_CPU_SETS
#undef X
    return sets;
}

const CpuKernels& chosen_cpu_kernels() {
    const std::vector<const CpuKernels*> sets = available_cpu_kernels();
    if (sets.empty()) {  // built with GYRE_NATIVE on another machine
        std::string built;
#define X(set) \
    built += built.empty() ? gyre_cpu_##set.title : std::string(", ") + gyre_cpu_##set.title;
        GYRE_CPU_SETS
#undef X
        throw input_error(
            fmt::format("this build requires a processor with {}, which this one is not; build it "
                        "for all, as scripts/test.sh does",
                        built));
    }
    const char* const wanted = std::getenv("GYRE_CPU");
    if (wanted == nullptr || *wanted == '\0') {
        return *sets.front();
    }
    for (const CpuKernels* set : sets) {
        if (set->name == std::string(wanted)) {
            return *set;
        }
    }
    throw usage_error(
        fmt::format("GYRE_CPU={}: this processor lacks this instruction set, or this build has no "
                    "kernels for it; unset it, or "
                    "choose one of {}",
                    wanted, names(sets)));
}

std::unique_ptr<Backend> make_cpu_backend(const CpuKernels& kernels, int threads) {
    return std::unique_ptr<Backend>(kernels.make_backend(threads));
}

}  // namespace gyre
