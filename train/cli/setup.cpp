#include "train/cli/setup.hpp"

#include <fmt/format.h>

#include <utility>

#include "base/option_names.hpp"
#include "kernels/make_backend.hpp"
#include "train/threads.hpp"

namespace gyre::train {

std::string with_flag_names(std::string_view message) {
    return name_options(message, [](std::string_view option) {
        static constexpr std::pair<std::string_view, std::string_view> kOthers[] = {
            {"rule", "--optimizer"},
            {"schedule", "--lr-schedule"},
            {"step_size", "--lr-step-size"},
            {"gamma", "--lr-gamma"},
            {"min_rate", "--lr-min"},
            {"warmup_steps", "--warmup-steps and --warmup-epochs"}};
        for (const auto& [name, flag] : kOthers) {
            if (name == option) {
                return std::string(flag);
            }
        }
        return "--" + std::string(option);
    });
}

TellOfData tell_of_data(const Communicator& comm, bool quiet) {
    if (quiet || !comm.is_root()) {
        return {};
    }
    return [](const std::string& text) { fmt::print(stderr, "gyre: {}\n", text); };
}

std::unique_ptr<Backend> make_backend(const RunSpec& run, const Communicator& comm) {
    const DeviceSpec& options = run.device;
    const bool automatic = options.device == "auto";
    const bool gpu = options.device == "cuda" || (automatic && cuda_device_count() > 0);
    if (!gpu && options.device != "emulated") {
        if (options.kernels != "ours" || run.net.precision == Precision::tf32 ||
            options.deterministic) {
            throw usage_error(
                "--kernels, --precision tf32 and --deterministic are about GPUs, but this run uses "
                "the CPU" +
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
    gpu_options.share = run.launch.share_gpu;
    gpu_options.kernels = options.kernels == "ours"    ? KernelSet::ours
                          : options.kernels == "cudnn" ? KernelSet::library
                                                       : KernelSet::automatic;
    gpu_options.deterministic = options.deterministic;
    // 16-bit values are exact in TF32.
    gpu_options.tf32 = run.net.precision != Precision::fp32;
    gpu_options.choices_file = options.kernels_cache;
    return gpu ? make_cuda_backend(gpu_options) : make_emulated_backend(gpu_options);
}

Normalisation choose_normalisation(const DataSpec& spec, const ImageSet& train) {
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
    if (spec.mean.empty() != spec.stddev.empty()) {
        throw usage_error("--mean and --std go together: give both, or neither");
    }
    if (spec.mean.empty()) {
        return measure_normalisation(train);
    }
    Normalisation result{spread(spec.mean, "--mean"), spread(spec.stddev, "--std")};
    for (const float value : result.stddev) {
        if (!(value > 0.0f)) {
            throw usage_error(fmt::format("--std {}: it must be greater than 0", value));
        }
    }
    return result;
}

}  // namespace gyre::train
