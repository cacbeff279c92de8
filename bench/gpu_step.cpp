#include "bench/gpu_step.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <memory>

#include "comm/communicator.hpp"
#include "kernels/make_backend.hpp"
#include "train/session.hpp"

namespace gyre::bench {
namespace {

// Returns the name without namespaces and template arguments.
std::string short_name(const simt::emulator::Launch& launch) {
    const std::string name = kernel_name(launch.entry);
    const std::string plain = name.substr(0, name.find('<'));
    const std::size_t colon = plain.rfind(':');
    return plain.empty() ? launch.kernel : plain.substr(colon == plain.npos ? 0 : colon + 1);
}

std::string extents(const simt::dim3& grid) {
    return grid.z > 1   ? fmt::format("{}x{}x{}", grid.x, grid.y, grid.z)
           : grid.y > 1 ? fmt::format("{}x{}", grid.x, grid.y)
                        : fmt::format("{}", grid.x);
}

void print_step(const StepWork& step, bool counted) {
    const std::vector<StepLaunch>& launches = step.launches;
    fmt::print("{:>3} {:<28} {:<26} {:>10} {:>5} {:>4} {:>7} {:>5} {:>7}", "", "launch", "kernel",
               "grid", "block", "regs", "shared", "warps", "waves");
    if (counted) {
        fmt::print(" {:>5} {:>6} {:>6} {:>6} {:>6} {:>9} {:>9} {:>8} {}", "busy", "ld/req",
                   "st/req", "shld", "shst", "MFLOP", "MB", "est. us", "bound");
    }
    fmt::print("\n");
    const TimeModel time;
    for (std::size_t i = 0; i < launches.size(); ++i) {
        const StepLaunch& each = launches[i];
        const simt::LaunchProfile& profile = each.profile;
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
        }
        fmt::print("\n");
    }
    fmt::print("{} launches, and in a graph of several steps {} cop{}", launches.size(),
               step.copies, step.copies == 1 ? "y" : "ies");
    if (counted) {
        fmt::print(", {:.1f} us by estimate", step.us(time));
    }
    fmt::print("\n");
}

}  // namespace

double StepWork::us(const TimeModel& time) const {
    double sum = static_cast<double>(copies) * time.gap_us;
    for (const StepLaunch& launch : launches) {
        sum += time.us(launch.bounds);
    }
    return sum;
}

StepWork step_work(const std::string& model, int n, model::Precision precision, const GpuModel& gpu,
                   const ResourceReports& reports, std::int64_t most_blocks) {
    simt::enable_profiler();
    simt::emulator::set_multiprocessors(gpu.multiprocessors);
    const auto comm = comm::make_single_communicator();
    GpuOptions gpu_options;
    gpu_options.tf32 = precision != model::Precision::fp32;
    const auto backend = make_emulated_backend(gpu_options);
    const Shape shape{1, 28, 28};
    constexpr int kWarmUps = 2, kSteps = 2;  // steps before the capture, and steps of a graph
    train::RunSpec run;
    run.net.precision = precision;
    run.batch.global_batch = n;
    run.device.graph = train::GraphUse::on;
    run.device.graph_steps = kSteps;
    if (model == "wide" || model == "resnet") {
        run.optimizer.rule = train::UpdateRule::adam;
    }
    const train::TrainingTask task{.model = model::load_model(model)};
    train::Session session(*comm, *backend, run, task,
                           train::random_images((kWarmUps + kSteps) * n, shape, task.classes),
                           data::Normalisation{{0.5f}, {0.25f}});
    session.initialise();
    train::Trainer& trainer = session.trainer();
    trainer.begin_epoch(1);
    simt::emulator::set_most_blocks(0);
    for (int i = 0; i < kWarmUps; ++i) {
        trainer.step(i, false);
    }
    backend->synchronize();
    simt::take_profiles();
    const std::int64_t copies = simt::emulator::copy_count();
    simt::emulator::set_most_blocks(most_blocks);
    trainer.step(kWarmUps, false);
    backend->synchronize();
    simt::emulator::set_most_blocks(-1);

    StepWork step;
    step.copies = (simt::emulator::copy_count() - copies) / kSteps;
    std::vector<simt::LaunchProfile> profiles = simt::take_profiles();
    profiles.resize(profiles.size() / kSteps);  // all steps have the same launches
    for (simt::LaunchProfile& profile : profiles) {
        StepLaunch each;
        each.resources = reports.of(profile.launch.entry);
        each.occupancy = occupancy(gpu, profile.launch, each.resources);
        each.bounds = bounds_of(gpu, profile, each.resources);
        each.profile = std::move(profile);
        step.launches.push_back(std::move(each));
    }
    return step;
}

std::string text_of_operation(const std::string& name,
                              const std::vector<simt::LaunchProfile>& profiles, const GpuModel& gpu,
                              const ResourceReports& reports) {
    const TimeModel time;
    std::string text;
    std::vector<Bounds> all;
    for (const simt::LaunchProfile& profile : profiles) {
        const Resources* resources = reports.of(profile.launch.entry);
        const Bounds bounds = all.emplace_back(bounds_of(gpu, profile, resources));
        text += simt::text_of(profile, name);
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
    using model::Precision;
    const Precision precision = options.type == DataType::bfloat16  ? Precision::bf16
                                : options.type == DataType::float16 ? Precision::fp16
                                : options.tf32                      ? Precision::tf32
                                                                    : Precision::fp32;
    for (const int n : options.batches.empty() ? std::vector{64} : options.batches) {
        fmt::print("one step of {} with {} images, {}, for {} ({} multiprocessors)\n", options.step,
                   n, precision == Precision::tf32 ? "tf32" : name_of(options.type), gpu.name,
                   gpu.multiprocessors);
        const StepWork step = step_work(options.step, n, precision, gpu, reports,
                                        options.profile ? kCountedBlocks : 0);
        print_step(step, options.profile);
        if (options.profile) {
            fmt::print("\n");
            for (std::size_t i = 0; i < step.launches.size(); ++i) {
                fmt::print("{}", simt::text_of(step.launches[i].profile, std::to_string(i + 1)));
            }
        }
        fmt::print("\n");
    }
    if (options.profile) {
        fmt::print(
            "ld/req, st/req: sectors of 32 bytes per request to global memory; shld, shst: "
            "wavefronts per request to shared memory.\nThe emulator counted at most {} blocks of "
            "each launch. The times are estimates by arithmetic (bench/gpu_models.hpp), not "
            "measured.\n",
            kCountedBlocks);
    }
    return 0;
}

}  // namespace gyre::bench
