// The launches of a training step, and what is said of them for a GPU that is not there.
#include "bench/gpu_step.hpp"

#include <fstream>
#include <set>

#include "kernels/emulation/places.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/expect_error.hpp"
#include "tests/support/temp_dir.hpp"

namespace gyre::bench {

using model::Precision;

namespace {

const ResourceReports kNoReports{"", ""};

simt::emulator::Launch launch_of(unsigned blocks, unsigned threads, std::size_t shared = 0) {
    return {"planted", nullptr, simt::dim3(blocks), simt::dim3(threads), shared};
}

}  // namespace

TEST_CASE("occupancy follows from threads, registers and shared memory", "[gpu-step]") {
    const GpuModel& h100 = gpu_model("h100");
    CHECK(occupancy(h100, launch_of(1056, 256), nullptr).blocks == 8);
    CHECK(occupancy(h100, launch_of(1056, 256), nullptr).waves == 1.0);
    CHECK(occupancy(h100, launch_of(1, 32), nullptr).blocks == 32);
    for (const auto& [registers, blocks] :
         {std::pair{32, 8}, {64, 4}, {65, 3}, {128, 2}, {255, 1}}) {
        const Resources resources{registers, 0};
        CHECK(occupancy(h100, launch_of(1, 256), &resources).blocks == blocks);
    }
    const Resources declared{32, 40 << 10};
    CHECK(occupancy(h100, launch_of(1, 256), &declared).blocks == 5);
    CHECK(occupancy(gpu_model("a100"), launch_of(1, 256), &declared).blocks == 4);
    CHECK(occupancy(h100, launch_of(132, 256, 200 << 10), nullptr).blocks == 1);
    CHECK(occupancy(h100, launch_of(132, 256, 200 << 10), nullptr).warps == 0.125);
    test::expect_error(ExitCode::usage, {"--gpu=b300: there are a100, h100, h200"},
                       [] { gpu_model("b300"); });
}

TEST_CASE("registers are found in the compiler's reports, for one architecture", "[gpu-step]") {
    const test::TempDir dir;
    std::ofstream(dir.path() / "add.cu.o.resources")
        << "ptxas info    : 0 bytes gmem\n"
           "ptxas info    : Compiling entry function '_ZN4gyre4cuda38_GLOBAL__N__0ab7c436_6_add_cu_"
           "001a0f9610add_kernelElPKfPf' for 'sm_80'\n"
           "ptxas info    : Used 20 registers, used 0 barriers\n"
           "ptxas info    : Compiling entry function '_ZN4gyre4cuda38_GLOBAL__N__0ab7c436_6_add_cu_"
           "001a0f9610add_kernelElPKfPf' for 'sm_90'\n"
           "ptxas info    : Used 18 registers, used 1 barriers, 4096 bytes smem\n";
    test::expect_error(ExitCode::usage, {"no report of a kernel for sm_100"},
                       [&] { ResourceReports(dir.path().string(), "sm_100"); });
    std::ofstream(dir.path() / "loops.txt") << "sm_80 0.00 3.00 add_kernel\n"
                                               "sm_90 5.25 2.50 add_kernel\n"
                                               "sm_90 4.00 2.00 other_kernel<1, 2>\n";
    const ResourceReports reports(dir.path().string(), "sm_90");
    CHECK(reports.of(reinterpret_cast<const void*>(&gpu_models)) == nullptr);
    const Resources* found = reports.of_kernel("add_kernel");
    REQUIRE(found != nullptr);
    CHECK(found->registers == 18);
    CHECK(found->shared_bytes == 4096);
    CHECK(found->per_mma == 5.25);
    CHECK(found->per_useful == 2.5);
}

TEST_CASE("a step is listed launch by launch, with or without running it", "[gpu-step]") {
    const GpuModel& gpu = gpu_model("h200");
    const auto listed = step_work("net", 64, Precision::fp32, gpu, kNoReports, 0).launches;
    const auto step = step_work("net", 64, Precision::fp32, gpu, kNoReports, 2);
    const auto& counted = step.launches;
    REQUIRE(listed.size() == counted.size());
    for (std::size_t i = 0; i < listed.size(); ++i) {
        INFO(i << " " << listed[i].profile.launch.kernel);
        CHECK(listed[i].profile.blocks == 0);
        CHECK(listed[i].bounds == Bounds{});
        CHECK(counted[i].profile.blocks > 0);
        CHECK(counted[i].profile.blocks <= 2);
        CHECK(counted[i].bounds != Bounds{});
        CHECK(counted[i].profile.launch.grid.x == listed[i].profile.launch.grid.x);
        CHECK(simt::function_at(listed[i].profile.launch.entry).find("kernel") !=
              std::string::npos);
    }
    const TimeModel time;
    CHECK(step.us(time) > 10.0);
    CHECK(step.us(time) < 200.0);
    // A step's result is copied to the host, which takes as long as a launch of nothing.
    CHECK(step.copies == 1);
    CHECK(step.us(time) - step.us({.gap_us = 0.0}) == Approx(3 * time.gap_us));
}

// Budgets: a step that needs more launches or copies, each a node of its graph, than it did fails
// here.
TEST_CASE("a step has no more launches and copies than its budget", "[gpu-step]") {
    const GpuModel& gpu = gpu_model("h200");
    const auto check = [&](const char* model, int n, Precision precision, std::size_t most_launches,
                           std::int64_t most_copies) {
        INFO(model << ", n = " << n << ", " << name_of(type_of(precision)));
        const StepWork step = step_work(model, n, precision, gpu, kNoReports, 0);
        CHECK(step.launches.size() <= most_launches);
        CHECK(step.copies <= most_copies);
    };
    check("net", 64, Precision::fp32, 2, 1);
    check("wide", 64, Precision::tf32, 14, 1);
    for (const int n : {64, 1024}) {
        check("wide", n, Precision::bf16, 14, 1);
        check("wide", n, Precision::fp16, 16, 1);
    }
    check("resnet", 64, Precision::fp32, 137, 19);
}

TEST_CASE("threads are busy in every kernel that takes more than a hundredth of a step",
          "[gpu-step]") {
    const GpuModel& gpu = gpu_model("h200");
    for (const auto& [model, precision] :
         {std::pair{"net", Precision::fp32}, {"wide", Precision::tf32}}) {
        const auto launches =
            step_work(model, 64, precision, gpu, kNoReports, kCountedBlocks).launches;
        std::vector<Bounds> all;
        for (const StepLaunch& launch : launches) {
            all.push_back(launch.bounds);
        }
        const TimeModel time;
        const double step_us = time.us(all);
        for (const StepLaunch& launch : launches) {
            INFO(model << ": " << launch.profile.launch.kernel);
            if (time.us(launch.bounds) > 0.01 * step_us) {
                CHECK(launch.profile.busy >= 0.75);
            }
        }
    }
}

TEST_CASE("an operation is counted as a GPU would be asked for it", "[gpu-step]") {
    const auto counts = counts_of("net", "conv1", "backward_weights", 64, false, 132);
    REQUIRE(counts.size() == 2);
    CHECK(counts.front().launch.grid.count() > 4);
    CHECK(counts.front().blocks == kCountedBlocks);
    const auto small = counts_of("net", "relu1", "forward", 1, false, 132);
    REQUIRE(small.size() == 1);
    CHECK(small.front().read_bytes == 1440 * 4.0);
    CHECK(small.front().written_bytes == 1440 * 4.0);
}

TEST_CASE("the model of time is fitted to times, and judged by others", "[gpu-step]") {
    const TimeModel truth{.gap_us = 2.1, .factors = {1.7, 0.6, 1.0, 1.4, 0.8, 1.2}};
    std::vector<TimedLaunches> timed;
    unsigned random = 1;
    const auto uniform = [&] {
        random = random * 1664525u + 1013904223u;
        return static_cast<double>(random >> 8) * 0x1p-24;
    };
    for (int i = 0; i < 200; ++i) {
        TimedLaunches& one = timed.emplace_back();
        for (int launch = 0; launch <= i % 3; ++launch) {
            Bounds& bounds = one.launches.emplace_back();
            for (double& bound : bounds) {
                bound = 10.0 * uniform();
            }
            bounds[static_cast<std::size_t>(i) % kBounds] *= 4.0;
        }
        one.measured_us = truth.us(one.launches) * (0.98 + 0.04 * uniform());
    }
    const FittedModel fitted = fit(timed);
    CHECK(fitted.error_before > 0.15);
    CHECK(fitted.error_fitted < 0.05);
    CHECK(fitted.error_others < 0.05);
    // Times that the counts say nothing of are not explained by them.
    for (TimedLaunches& one : timed) {
        one.measured_us = 1.0 + 1000.0 * uniform();
    }
    CHECK(fit(timed).error_others > 0.2);
}

}  // namespace gyre::bench
