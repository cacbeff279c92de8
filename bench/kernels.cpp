// Times every kernel at shapes of the built-in nets, and gives its share of the device's ceiling as
// measured in the same run.
//
//   build/bench-kernels [--device=auto|cpu|cuda|emulated] [--batches=64,256]
//                       [--precision=fp32|tf32|bf16|fp16] [--launch=graph|stream] [--check]
//                       [--benchmark_filter=conv]
//                       [--benchmark_out=FILE.json]
//   build/bench-kernels --device=emulated --profile [--gpu=h200] ...
//   build/bench-kernels --device=emulated --step=net [--profile] [--gpu=h200] ...
//
// kernels_cpu.cpp runs on the CPU; kernels_gpu.cpp runs on a GPU and compares with cuDNN and
// cuBLAS. The device `emulated` runs the GPU benchmark on the emulator to test the benchmark
// itself; its times mean nothing. With --profile the emulator counts the kernels' accesses, FLOPs
// and busy threads (kernels/emulation/profiler.hpp), with --step it lists the launches of a whole
// training step (gpu_step.hpp).
//
// Exit codes: 0; 1: a wrong result or an error; 2: wrong flags; 3: a goal of --check is missed.
#include "bench/kernels.hpp"

#include <benchmark/benchmark.h>
#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <exception>
#include <string_view>

#if defined(GYRE_HAVE_PROFILER)
#include "bench/gpu_step.hpp"
#endif
#include "base/error.hpp"
#include "base/option_names.hpp"
#include "kernels/make_backend.hpp"

namespace gyre::bench {

namespace {

constexpr const char* kUsage =
    "bench-kernels: time of every kernel at shapes of net, wide and resnet\n"
    "  --device=auto|cpu|cuda|emulated   [auto: a GPU if there is one]\n"
    "  --batches=N,N,...                 images per call [CPU: 64,256; GPU: 64,256,1024,4096]\n"
    "  --precision=fp32|tf32|bf16|fp16   tf32, GPU: matrix products may use TF32 tensor cores; "
    "bf16 and\n"
    "                                    fp16 with --step: activations have 16 bits\n"
    "  --launch=graph|stream             GPU: time replays of a CUDA graph [graph], or plain "
    "calls\n"
    "  --check                           GPU: exit with code 3 if a goal is missed\n"
    "  --profile                         emulated: count what kernels do instead of timing them\n"
    "  --step=MODEL                      emulated: list the launches of a training step\n"
    "  --gpu=a100|h100|h200              GPU of --profile and --step [h200]\n"
    "  --resources=DIR                   ptxas' reports [kernels/ next to this program]\n"
    "and Google Benchmark's flags, such as --benchmark_filter=REGEX --benchmark_out=FILE.json\n";

std::vector<int> parse_batches(std::string_view text) {
    std::vector<int> batches;
    const char* at = text.data();
    const char* const end = at + text.size();
    while (true) {
        int n = 0;
        const auto [rest, error] = std::from_chars(at, end, n);
        if (error != std::errc{} || n < 1 || n > 1 << 16 || (rest != end && *rest != ',')) {
            throw usage_error(fmt::format(
                "--batches={}: give numbers of images from 1 to 65536, such as 64,256", text));
        }
        batches.push_back(n);
        if (rest == end) {
            return batches;
        }
        at = rest + 1;
    }
}

Options parse(int argc, char** argv) {
    Options options;
    bool about_gpus = false;
    for (int i = 1; i < argc; ++i) {
        const std::string_view word = argv[i];
        const std::size_t equals = std::min(word.find('='), word.size());
        const std::string_view name = word.substr(0, equals);
        const std::string_view value =
            equals < word.size() ? word.substr(equals + 1) : std::string_view{};
        const auto is_one_of = [&](std::initializer_list<std::string_view> values) {
            return std::find(values.begin(), values.end(), value) != values.end();
        };
        if (name == "--device" && is_one_of({"auto", "cpu", "cuda", "emulated"})) {
            options.device = value;
        } else if (name == "--batches") {
            options.batches = parse_batches(value);
        } else if (name == "--launch" && is_one_of({"graph", "stream"})) {
            options.graph = value == "graph";
            about_gpus = true;
        } else if (name == "--precision" && is_one_of({"fp32", "tf32", "bf16", "fp16"})) {
            options.tf32 = value != "fp32";
            options.type = value == "bf16"   ? DataType::bfloat16
                           : value == "fp16" ? DataType::float16
                                             : DataType::float32;
            about_gpus = about_gpus || options.tf32;
        } else if (word == "--check") {
            options.check = about_gpus = true;
        } else if (word == "--profile") {
            options.profile = true;
        } else if (name == "--step" && !value.empty()) {
            options.step = value;
        } else if (name == "--gpu" && !value.empty()) {
            options.gpu = value;
        } else if (name == "--resources" && !value.empty()) {
            options.resources = value;
        } else {
            throw usage_error(fmt::format("unknown flag or value: {}\n{}", word, kUsage));
        }
    }
    const int gpus = cuda_device_count();
    if (options.device == "auto") {
        options.device = gpus > 0 ? "cuda" : "cpu";
    }
    if (options.device == "cuda" && gpus == 0) {
        throw usage_error(
            "--device=cuda: no GPU was found (or this build has no CUDA: see `gyre info`); use "
            "--device=cpu");
    }
    if (options.device == "cpu" && about_gpus) {
        throw usage_error(
            "--precision, --launch and --check apply to GPUs, but this run uses the CPU");
    }
    if (options.type != DataType::float32 && options.step.empty()) {
        throw usage_error("--precision=bf16 and fp16 apply to steps; add --step=MODEL");
    }
    if ((options.profile || !options.step.empty()) && options.device != "emulated") {
        throw usage_error("--profile and --step count on the emulator; add --device=emulated");
    }
    return options;
}

int run(const Options& options) {
    if (options.device == "cpu") {
        return run_on_cpu(options);
    }
#if defined(GYRE_HAVE_CUDA)
    if (options.device == "cuda") {
        return cuda::run_benchmarks(options);
    }
#endif
#if defined(GYRE_HAVE_PROFILER)
    if (!options.step.empty()) {
        return run_step(options);
    }
#else
    if (options.profile || !options.step.empty()) {
        throw usage_error("--profile and --step need a build with g++ and without sanitizers");
    }
#endif
    return emulated::run_benchmarks(options);
}

}  // namespace
}  // namespace gyre::bench

int main(int argc, char** argv) {
    for (int i = 1; i < argc; ++i) {
        if (std::string_view(argv[i]) == "--help") {  // Google Benchmark lists only its own flags
            fmt::print("{}", gyre::bench::kUsage);
            return 0;
        }
    }
    benchmark::Initialize(&argc, argv);
    int result = 1;
    try {
        result = gyre::bench::run(gyre::bench::parse(argc, argv));
    } catch (const gyre::Error& error) {
        fmt::print(stderr, "bench-kernels: {}\n", gyre::name_flags(error.what()));
        return error.code() == gyre::ExitCode::usage ? 2 : 1;
    } catch (const std::exception& error) {
        fmt::print(stderr, "bench-kernels: {}\n", gyre::name_flags(error.what()));
        return 1;
    }
    benchmark::Shutdown();
    return result;
}
