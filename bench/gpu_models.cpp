#include "bench/gpu_models.hpp"

#include <cxxabi.h>
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <memory>
#include <regex>

#include "base/error.hpp"
#include "kernels/emulation/places.hpp"

namespace gyre::bench {
namespace {

// Returns a kernel's name with its template's arguments, without namespaces and parameters, so that
// the emulator's and the GPU's kernel have the same name: "direct_forward_kernel<5, 8>".
std::string plain_name(std::string name) {
    for (const char* space :
         {"(anonymous namespace)::", "gyre::", "emulated::", "cuda::", "simt::"}) {
        for (std::size_t at; (at = name.find(space)) != name.npos;) {
            name.erase(at, std::string_view(space).size());
        }
    }
    int depth = 0;
    for (std::size_t i = 0; i < name.size(); ++i) {
        depth += name[i] == '<' ? 1 : name[i] == '>' ? -1 : 0;
        if (name[i] == '(' && depth == 0) {
            name.erase(i);
        }
    }
    if (name.rfind("void ", 0) == 0) {
        name.erase(0, 5);
    }
    return name;
}

std::string demangled(const std::string& name) {
    int status = 0;
    const std::unique_ptr<char, void (*)(void*)> text(
        abi::__cxa_demangle(name.c_str(), nullptr, nullptr, &status), std::free);
    return status == 0 ? text.get() : name;
}

}  // namespace

const std::vector<GpuModel>& gpu_models() {
    static const std::vector<GpuModel> models = {{.name = "a100",
                                                  .architecture = "sm_80",
                                                  .multiprocessors = 108,
                                                  .clock_ghz = 1.41,
                                                  .shared_bytes = 164 << 10,
                                                  .dram_gbs = 1400,
                                                  .l2_gbs = 3500,
                                                  .l2_bytes = 40e6,
                                                  .tensor_flop = 1024},
                                                 {.name = "h100",
                                                  .architecture = "sm_90",
                                                  .multiprocessors = 132,
                                                  .clock_ghz = 1.83,
                                                  .shared_bytes = 228 << 10,
                                                  .dram_gbs = 3000,
                                                  .l2_gbs = 5500,
                                                  .l2_bytes = 50e6,
                                                  .tensor_flop = 2048},
                                                 {.name = "h200",
                                                  .architecture = "sm_90",
                                                  .multiprocessors = 132,
                                                  .clock_ghz = 1.83,
                                                  .shared_bytes = 228 << 10,
                                                  .dram_gbs = 4000,
                                                  .l2_gbs = 5500,
                                                  .l2_bytes = 50e6,
                                                  .tensor_flop = 2048}};
    return models;
}

std::string kernel_name(const void* entry) {
    static std::map<const void*, std::string> names;  // a lookup of each runs a program
    const auto [found, is_new] = names.try_emplace(entry);
    if (is_new) {
        found->second = plain_name(simt::function_at(entry));
    }
    return found->second;
}

const GpuModel& gpu_model(const std::string& name) {
    std::string names;
    for (const GpuModel& model : gpu_models()) {
        if (model.name == name) {
            return model;
        }
        names += (names.empty() ? "" : ", ") + model.name;
    }
    throw usage_error(fmt::format("--gpu={}: there are {}", name, names));
}

const GpuModel* gpu_model_of(const std::string& device) {
    for (const GpuModel& model : gpu_models()) {
        std::string name = model.name;
        name[0] = static_cast<char>(std::toupper(name[0]));
        if (device.find(name) != device.npos) {
            return &model;
        }
    }
    return nullptr;
}

ResourceReports::ResourceReports(const std::string& given, const std::string& architecture) {
    std::error_code error;
    const std::filesystem::path folder =
        !given.empty()
            ? std::filesystem::path(given)
            : std::filesystem::read_symlink("/proc/self/exe", error).parent_path() / "kernels";
    const std::regex entry("Compiling entry function '([^']+)' for '([^']+)'");
    const std::regex used("Used ([0-9]+) registers.*");
    const std::regex shared("([0-9]+) bytes smem");
    for (const auto& file : std::filesystem::recursive_directory_iterator(folder, error)) {
        if (file.path().extension() != ".resources") {
            continue;
        }
        std::ifstream lines(file.path());
        std::string kernel;
        for (std::string line; std::getline(lines, line);) {
            std::smatch match;
            if (std::regex_search(line, match, entry)) {
                kernel = match[2] == architecture ? plain_name(demangled(match[1])) : "";
            } else if (!kernel.empty() && std::regex_search(line, match, used)) {
                Resources& resources = kernels_[kernel];
                resources.registers = std::stoi(match[1]);
                if (std::regex_search(line, match, shared)) {
                    resources.shared_bytes = std::stol(match[1]);
                }
            }
        }
    }
    std::ifstream loops(folder / "loops.txt");
    std::string of_architecture, name;
    for (Resources of; loops >> of_architecture >> of.per_mma >> of.per_useful &&
                       std::getline(loops >> std::ws, name);) {
        if (const auto found = kernels_.find(plain_name(name));
            of_architecture == architecture && found != kernels_.end()) {
            found->second.per_mma = of.per_mma;
            found->second.per_useful = of.per_useful;
        }
    }
    if (kernels_.empty() && !given.empty()) {
        throw usage_error(
            fmt::format("--resources={}: no report of a kernel for {} there; give the "
                        "kernels folder of a build with CUDA",
                        given, architecture));
    }
}

const Resources* ResourceReports::of(const void* entry) const {
    return kernels_.empty() ? nullptr : of_kernel(kernel_name(entry));
}

const Resources* ResourceReports::of_kernel(const std::string& name) const {
    const auto found = kernels_.find(name);
    return found == kernels_.end() ? nullptr : &found->second;
}

Occupancy occupancy(const GpuModel& gpu, const simt::emulator::Launch& launch,
                    const Resources* resources) {
    const auto threads = static_cast<int>(launch.block.count());
    int blocks = std::min(gpu.max_blocks, gpu.max_threads / threads);
    std::int64_t shared = static_cast<std::int64_t>(launch.shared_bytes);
    if (resources != nullptr) {
        // Registers are allocated to warps in units of 256.
        const int of_warp = (resources->registers * 32 + 255) / 256 * 256;
        blocks = std::min(blocks, gpu.registers / (of_warp * (threads / 32)));
        shared += resources->shared_bytes;
    }
    constexpr std::int64_t kOfSystem = 1 << 10;  // bytes that the system uses in each block
    blocks = std::max(1, static_cast<int>(std::min<std::int64_t>(
                             blocks, gpu.shared_bytes / (shared + kOfSystem))));
    return {blocks, static_cast<double>(blocks * threads) / gpu.max_threads,
            static_cast<double>(launch.grid.count()) / (blocks * gpu.multiprocessors)};
}

Bounds bounds_of(const GpuModel& gpu, const simt::LaunchProfile& profile,
                 const Resources* resources) {
    if (profile.blocks == 0) {
        return {};
    }
    // Assumptions if the machine code is not known.
    constexpr double kPerUseful = 1.6, kPerMma = 4.0;
    constexpr double kSchedulers = 4.0;  // per multiprocessor, one instruction per cycle each
    constexpr double kLoadCycles = 700;  // latency of a load from DRAM or L2
    constexpr double kBarrierCycles = 40, kClusterBarrierCycles = 200;
    constexpr double kRemoteCycles = 200;          // latency of a load from another multiprocessor
    constexpr double kRemoteSectors = 1;           // that a multiprocessor gets per cycle
    constexpr double kIssueCycles = 2.0;           // between instructions of one warp
    constexpr double kMmaFlop = 2.0 * 16 * 8 * 8;  // of m16n8k8
    constexpr double kMmaCycles = 8.0;             // of m16n8k8; sums are independent

    using simt::Traffic;
    const auto both = [](const Traffic& a, const Traffic& b, auto member) {
        return static_cast<double>(a.*member + b.*member);
    };
    const auto requests = [&](const Traffic& a, const Traffic& b) {
        return both(a, b, &Traffic::requests);
    };
    const double sectors =
        both(profile.global_loads, profile.global_stores, &Traffic::transactions);
    const double wavefronts =
        both(profile.shared_loads, profile.shared_stores, &Traffic::transactions);
    const double remote = both(profile.remote_loads, profile.remote_stores, &Traffic::transactions);
    const auto known = [](double found, double otherwise) { return found > 0 ? found : otherwise; };
    const double per_useful = known(resources == nullptr ? 0 : resources->per_useful, kPerUseful);
    const double per_mma = known(resources == nullptr ? 0 : resources->per_mma, kPerMma);
    // The instructions per mma of a loop include its accesses.
    const bool products = profile.mmas > 0;
    const double instructions =
        products ? per_mma * static_cast<double>(profile.mmas)
                 : per_useful * (static_cast<double>(profile.warp_fmas) +
                                 requests(profile.global_loads, profile.global_stores) +
                                 requests(profile.shared_loads, profile.shared_stores) +
                                 requests(profile.remote_loads, profile.remote_stores));

    // The multiprocessor with the most blocks determines the time.
    const double per_block = 1.0 / static_cast<double>(profile.blocks);
    const double blocks = per_block * std::ceil(static_cast<double>(profile.launch.grid.count()) /
                                                gpu.multiprocessors);
    const double rounds = std::max(1.0, std::ceil(occupancy(gpu, profile.launch, resources).waves));
    const double chain =
        profile.load_phases * kLoadCycles +
        static_cast<double>(profile.barriers) * per_block * kBarrierCycles +
        static_cast<double>(profile.cluster_barriers) * per_block * kClusterBarrierCycles +
        profile.remote_phases * kRemoteCycles +
        (profile.longest_fmas + profile.longest_requests) * kIssueCycles +
        profile.longest_mmas * kMmaCycles;
    const double cycle_us = 1e-3 / gpu.clock_ghz;
    const double bytes = profile.read_bytes + profile.written_bytes;
    const double byte_us = 1e-3 / (bytes > gpu.l2_bytes / 2 ? gpu.dram_gbs : gpu.l2_gbs);
    return {instructions / kSchedulers * blocks * cycle_us,
            (wavefronts + sectors / 4.0 + remote / kRemoteSectors) * blocks * cycle_us,
            // An mma of 16 bits takes as long as one of TF32, for twice the FLOPs.
            static_cast<double>(profile.mmas) * kMmaFlop / gpu.tensor_flop * blocks * cycle_us,
            chain * rounds * cycle_us, bytes * byte_us,
            sectors * profile.scale() * 32.0 / gpu.l2_gbs * 1e-3};
}

const char* name_of(Bound bound) {
    constexpr std::array<const char*, kBounds> kNames = {"issue",   "shared", "tensor",
                                                         "latency", "memory", "L2"};
    return kNames[static_cast<std::size_t>(bound)];
}

double TimeModel::us(const Bounds& launch) const {
    const auto at = static_cast<std::size_t>(largest(launch));
    return gap_us + factors[at] * launch[at];
}

double TimeModel::us(const std::vector<Bounds>& launches) const {
    double sum = 0.0;
    for (const Bounds& launch : launches) {
        sum += us(launch);
    }
    return sum;
}

Bound TimeModel::largest(const Bounds& launch) const {
    std::size_t at = 0;
    for (std::size_t i = 1; i < kBounds; ++i) {
        if (factors[i] * launch[i] > factors[at] * launch[at]) {
            at = i;
        }
    }
    return static_cast<Bound>(at);
}

namespace {

// Returns the median error of every `step`-th entry from `first` on.
double median_error(const TimeModel& model, const std::vector<TimedLaunches>& timed,
                    std::size_t first, std::size_t step) {
    std::vector<double> errors;
    for (std::size_t i = first; i < timed.size(); i += step) {
        errors.push_back(std::abs(model.us(timed[i].launches) / timed[i].measured_us - 1.0));
    }
    if (errors.empty()) {
        return 0.0;
    }
    const auto middle = errors.begin() + static_cast<std::ptrdiff_t>(errors.size() / 2);
    std::nth_element(errors.begin(), middle, errors.end());
    return *middle;
}

// Returns the sum that fit() minimises: large errors count, but not as their squares.
double loss(const TimeModel& model, const std::vector<TimedLaunches>& timed) {
    double sum = 0.0;
    for (std::size_t i = 0; i < timed.size(); i += 2) {
        sum += std::abs(std::log(model.us(timed[i].launches) / timed[i].measured_us));
    }
    return sum;
}

}  // namespace

// Changes one constant after another, by steps that become smaller.
FittedModel fit(const std::vector<TimedLaunches>& timed) {
    FittedModel result;
    result.model = {.gap_us = 1.3, .factors = {1, 1, 1, 1, 1, 1}};  // whatever was fitted before
    result.error_before = median_error({}, timed, 0, 1);
    double best = loss(result.model, timed);
    for (double step = 2.0; step > 1.01;) {
        bool better = false;
        for (std::size_t i = 0; i <= kBounds; ++i) {
            for (const double factor : {step, 1.0 / step}) {
                TimeModel other = result.model;
                (i == kBounds ? other.gap_us : other.factors[i]) *= factor;
                if (const double now = loss(other, timed); now < best) {
                    best = now;
                    result.model = other;
                    better = true;
                }
            }
        }
        step = better ? step : std::sqrt(step);
    }
    result.error_fitted = median_error(result.model, timed, 0, 2);
    result.error_others = median_error(result.model, timed, 1, 2);
    return result;
}

}  // namespace gyre::bench
