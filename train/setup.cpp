#include "train/setup.hpp"

#include <fmt/format.h>
#include <sched.h>

#include <algorithm>
#include <cstring>
#include <thread>

namespace gyre::train {
namespace {

// Multiply and shift, eight bytes at a time: for telling files apart, not against an adversary.
class Hash {
 public:
    void add(const void* data, std::size_t bytes) {
        const auto* at = static_cast<const unsigned char*>(data);
        mix(bytes);
        for (; bytes >= 8; at += 8, bytes -= 8) {
            std::uint64_t word;
            std::memcpy(&word, at, 8);
            mix(word);
        }
        std::uint64_t rest = 0;
        std::memcpy(&rest, at, bytes);
        mix(rest);
    }
    std::string text() const { return fmt::format("{:016x}", state_); }
    std::uint64_t value() const { return state_; }

 private:
    void mix(std::uint64_t word) {
        state_ = (state_ ^ word) * 0x9E3779B97F4A7C15u;
        state_ ^= state_ >> 29;
    }
    std::uint64_t state_ = 0x6779726500000000u;
};

}  // namespace

int choose_threads(int asked, const Communicator& comm) {
    if (asked > 0) {
        return asked;
    }
    const int processors = std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
    cpu_set_t mask;
    const int allowed =
        sched_getaffinity(0, sizeof mask, &mask) == 0 ? CPU_COUNT(&mask) : processors;
    // A launcher that binds its ranks has divided the processors already.
    return allowed < processors ? allowed : std::max(1, processors / comm.local_size());
}

std::unique_ptr<Backend> make_backend(const CommonOptions& options, const Communicator& comm) {
    const bool automatic = options.device == "auto";
    const bool gpu = options.device == "cuda" || (automatic && cuda_device_count() > 0);
    if (!gpu && options.device != "emulated") {
        if (options.kernels != "ours" || options.tf32 || options.deterministic) {
            throw usage_error(
                "--kernels, --tf32 and --deterministic are about GPUs, but this run "
                "uses the CPU" +
                std::string(automatic ? ", as no GPU was found" : ""));
        }
        return make_cpu_backend(choose_threads(options.threads, comm));
    }
    if (options.deterministic && options.kernels == "auto") {
        throw usage_error(
            "--deterministic and --kernels auto exclude each other: timings choose the kernels, "
            "and "
            "differ from run to run; use --kernels ours or cudnn");
    }
    GpuOptions gpu_options;
    gpu_options.device = comm.local_rank();
    gpu_options.share = options.launch.share_gpu;
    gpu_options.kernels = options.kernels == "ours"    ? KernelSet::ours
                          : options.kernels == "cudnn" ? KernelSet::library
                                                       : KernelSet::automatic;
    gpu_options.deterministic = options.deterministic;
    gpu_options.tf32 = options.tf32;
    gpu_options.choices_file = options.kernels_cache;
    return gpu ? make_cuda_backend(gpu_options) : make_emulated_backend(gpu_options);
}

bool choose_graph(const TrainOptions& options, const Backend& backend, const Reducer& reducer) {
    const bool possible = backend.can_capture() && reducer.direct();
    if (options.graph == "on" && !possible) {
        throw AgreedError(ExitCode::usage,
                          backend.can_capture()
                              ? "--graph on needs ranks that reduce on their GPUs, or one rank: "
                                "here gradients travel through the host's memory; leave it at auto"
                              : "--graph on is about GPUs, but this run uses the CPU");
    }
    // Emulated, a graph saves nothing.
    return possible &&
           (options.graph == "on" || (options.graph == "auto" && options.device != "emulated"));
}

Normalisation choose_normalisation(const CommonOptions& options, const ImageSet& train) {
    const auto channels = static_cast<std::size_t>(train.channels);
    const auto spread = [&](std::vector<float> values, const char* flag) {
        if (values.size() == 1) {
            values.resize(channels, values[0]);
        }
        if (values.size() != channels) {
            throw usage_error(
                fmt::format("{} has {} values, but the images have {} channels; give "
                            "one value, or one for each channel",
                            flag, values.size(), channels));
        }
        return values;
    };
    if (options.mean.empty() != options.stddev.empty()) {
        throw usage_error("--mean and --std go together: give both, or neither");
    }
    if (options.mean.empty()) {
        return measure_normalisation(train);
    }
    Normalisation result{spread(options.mean, "--mean"), spread(options.stddev, "--std")};
    for (const float value : result.stddev) {
        if (!(value > 0.0f)) {
            throw usage_error(fmt::format("--std {}: it must be greater than 0", value));
        }
    }
    return result;
}

std::string hash_dataset(const Dataset& dataset) {
    Hash hash;
    for (const ImageSet* set : {&dataset.train, &dataset.test}) {
        const std::int64_t extents[] = {set->count, set->channels, set->height, set->width};
        hash.add(extents, sizeof extents);
        hash.add(set->pixels.data(), set->pixels.size());
        hash.add(set->labels.data(), set->labels.size() * sizeof(std::int32_t));
    }
    return hash.text();
}

std::uint64_t hash_bytes(const void* data, std::size_t bytes) {
    Hash hash;
    hash.add(data, bytes);
    return hash.value();
}

std::string hash_text(const std::string& text) {
    Hash hash;
    hash.add(text.data(), text.size());
    return hash.text();
}

std::string version_text() {
    return "gyre " GYRE_VERSION " (" GYRE_BUILD ")";
}

}  // namespace gyre::train
