#include "bench/gpu_step.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <memory>

#include "comm/communicator.hpp"
#include "train/session.hpp"

namespace gyre::bench {
namespace {

// Without what tells instances of a template apart.
std::string short_name(const emulated::emulator::Launch& launch) {
    const std::string name = kernel_name(launch.entry);
    const std::string plain = name.substr(0, name.find('<'));
    const std::size_t colon = plain.rfind(':');
    return plain.empty() ? launch.kernel : plain.substr(colon == plain.npos ? 0 : colon + 1);
}

std::string extents(const emulated::dim3& grid) {
    return grid.z > 1   ? fmt::format("{}x{}x{}", grid.x, grid.y, grid.z)
           : grid.y > 1 ? fmt::format("{}x{}", grid.x, grid.y)
                        : fmt::format("{}", grid.x);
}

void print_launches(const std::vector<StepLaunch>& launches, bool counted) {
    fmt::print("{:>3} {:<28} {:<26} {:>10} {:>5} {:>4} {:>7} {:>5} {:>7}", "", "launch", "kernel",
               "grid", "block", "regs", "shared", "warps", "waves");
    if (counted) {
        fmt::print(" {:>5} {:>6} {:>6} {:>6} {:>6} {:>9} {:>9} {:>8} {}", "busy", "ld/req",
                   "st/req", "shld", "shst", "MFLOP", "MB", "est. us", "bound");
    }
    fmt::print("\n");
    const TimeModel time;
    double us = 0.0;
    for (std::size_t i = 0; i < launches.size(); ++i) {
        const StepLaunch& each = launches[i];
        const emulated::LaunchProfile& profile = each.profile;
        const Resources* known = each.resources;
        fmt::print("{:>3} {:<28} {:<26} {:>10} {:>5} {:>4} {:>7} {:>3.0f} % {:>7.2f}", i + 1,
                   profile.launch.kernel, short_name(profile.launch).substr(0, 26),
                   extents(profile.launch.grid), profile.launch.block.count(),
                   known == nullptr ? "?" : std::to_string(known->registers),
                   static_cast<std::int64_t>(profile.launch.shared_bytes) +
                       (known == nullptr ? 0 : known->shared_bytes),
                   100.0 * each.occupancy.warps, each.occupancy.waves);
        if (counted) {
            const double scale = profile.scale();
            fmt::print(
                " {:>3.0f} % {:>6.2f} {:>6.2f} {:>6.2f} {:>6.2f} {:>9.2f} {:>9.3f} {:>8.1f} {}",
                100.0 * profile.busy, profile.global_loads.per_request(),
                profile.global_stores.per_request(), profile.shared_loads.per_request(),
                profile.shared_stores.per_request(),
                1e-6 * scale * static_cast<double>(profile.flop + profile.tensor_flop),
                1e-6 * (profile.read_bytes + profile.written_bytes), time.us(each.bounds),
                name_of(time.largest(each.bounds)));
            us += time.us(each.bounds);
        }
        fmt::print("\n");
    }
    fmt::print("{} launches", launches.size());
    if (counted) {
        fmt::print(", {:.1f} us by estimate", us);
    }
    fmt::print("\n");
}

}  // namespace

std::vector<StepLaunch> step_launches(const std::string& model, int n,
                                      const StepPrecision& precision, const GpuModel& gpu,
                                      const ResourceReports& reports, std::int64_t most_blocks) {
    emulated::enable_profiler();
    emulated::emulator::set_multiprocessors(gpu.multiprocessors);
    const auto comm = comm::make_single_communicator();
    GpuOptions gpu_options;
    gpu_options.tf32 = precision.tf32;
    const auto backend = make_emulated_backend(gpu_options);
    const Shape shape{1, 28, 28};
    train::SessionSpec spec;
    spec.model = model::load_model(model);
    spec.global_batch = n;
    spec.type = precision.type;
    if (model == "wide" || model == "resnet") {
        spec.optimizer.rule = train::UpdateRule::adam;
    }
    if (precision.type == DataType::float16) {
        spec.optimizer.loss_scaling.emplace();
    }
    train::Session session(*comm, *backend, spec, train::random_images(2 * n, shape, spec.classes),
                           data::Normalisation{{0.5f}, {0.25f}});
    session.initialise();
    train::Trainer& trainer = session.trainer();
    trainer.begin_epoch(1);
    emulated::emulator::set_most_blocks(0);
    trainer.step(0, false);
    backend->synchronize();
    emulated::take_profiles();
    emulated::emulator::set_most_blocks(most_blocks);
    trainer.step(1, false);
    backend->synchronize();
    emulated::emulator::set_most_blocks(-1);

    std::vector<StepLaunch> launches;
    for (emulated::LaunchProfile& profile : emulated::take_profiles()) {
        StepLaunch each;
        each.resources = reports.of(profile.launch.entry);
        each.occupancy = occupancy(gpu, profile.launch, each.resources);
        each.bounds = bounds_of(gpu, profile, each.resources);
        each.profile = std::move(profile);
        launches.push_back(std::move(each));
    }
    return launches;
}

std::string text_of_operation(const std::string& name,
                              const std::vector<emulated::LaunchProfile>& profiles,
                              const GpuModel& gpu, const ResourceReports& reports) {
    const TimeModel time;
    std::string text;
    std::vector<Bounds> all;
    for (const emulated::LaunchProfile& profile : profiles) {
        const Resources* resources = reports.of(profile.launch.entry);
        const Bounds bounds = all.emplace_back(bounds_of(gpu, profile, resources));
        text += emulated::text_of(profile, name);
        text +=
            fmt::format("  estimate for {}: {:.1f} us, bound by {}; {} registers, {:.2f} waves\n",
                        gpu.name, time.us(bounds), name_of(time.largest(bounds)),
                        resources == nullptr ? "?" : std::to_string(resources->registers),
                        occupancy(gpu, profile.launch, resources).waves);
    }
    return text + fmt::format("{}: {:.1f} us by estimate, {} launches\n\n", name, time.us(all),
                              profiles.size());
}

int run_step(const Options& options) {
    const GpuModel& gpu = gpu_model(options.gpu);
    const ResourceReports reports(options.resources, gpu.architecture);
    for (const int n : options.batches.empty() ? std::vector{64} : options.batches) {
        fmt::print(
            "one step of {} with {} images, {}, for {} ({} multiprocessors)\n", options.step, n,
            options.type == DataType::float32 && options.tf32 ? "tf32" : name_of(options.type),
            gpu.name, gpu.multiprocessors);
        const std::vector<StepLaunch> launches =
            step_launches(options.step, n, {options.tf32, options.type}, gpu, reports,
                          options.profile ? kCountedBlocks : 0);
        print_launches(launches, options.profile);
        if (options.profile) {
            fmt::print("\n");
            for (std::size_t i = 0; i < launches.size(); ++i) {
                fmt::print("{}", emulated::text_of(launches[i].profile, std::to_string(i + 1)));
            }
        }
        fmt::print("\n");
    }
    if (options.profile) {
        fmt::print(
            "ld/req, st/req: sectors of 32 bytes a request to global memory; shld, shst: "
            "wavefronts a "
            "request to shared memory.\nCounted on the emulator, in {} blocks of a launch at most. "
            "The "
            "times are estimates by arithmetic (bench/gpu_models.hpp), not measured.\n",
            kCountedBlocks);
    }
    return 0;
}

}  // namespace gyre::bench
