// The launches of a training step, and what is said of them for a GPU that is not there.
#include "bench/gpu_step.hpp"

#include <fstream>
#include <set>

#include "kernels/emulation/places.hpp"
#include "tests/catch.hpp"
#include "tests/expect_error.hpp"
#include "tests/temp_dir.hpp"

namespace gyre::bench {
namespace {

const ResourceReports kNoReports{"", ""};

emulated::emulator::Launch launch_of(unsigned blocks, unsigned threads, std::size_t shared = 0) {
    return {"planted", nullptr, emulated::dim3(blocks), emulated::dim3(threads), shared};
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
    const ResourceReports reports(dir.path().string(), "sm_90");
    CHECK(reports.of(reinterpret_cast<const void*>(&gpu_models)) == nullptr);
    const Resources* found = reports.of_kernel("add_kernel");
    REQUIRE(found != nullptr);
    CHECK(found->registers == 18);
    CHECK(found->shared_bytes == 4096);
}

TEST_CASE("a step is listed launch by launch, with or without running it", "[gpu-step]") {
    const GpuModel& gpu = gpu_model("h200");
    const auto listed = step_launches("net", 64, false, gpu, kNoReports, 0);
    const auto counted = step_launches("net", 64, false, gpu, kNoReports, 2);
    REQUIRE(listed.size() == counted.size());
    double us = 0.0;
    for (std::size_t i = 0; i < listed.size(); ++i) {
        INFO(i << " " << listed[i].profile.launch.kernel);
        CHECK(listed[i].profile.blocks == 0);
        CHECK(listed[i].estimate.us == 0.0);
        CHECK(counted[i].profile.blocks > 0);
        CHECK(counted[i].profile.blocks <= 2);
        CHECK(counted[i].estimate.us > 1.0);
        CHECK(counted[i].profile.launch.grid.x == listed[i].profile.launch.grid.x);
        CHECK(emulated::function_at(listed[i].profile.launch.entry).find("kernel") !=
              std::string::npos);
        us += counted[i].estimate.us;
    }
    CHECK(us > 10.0);
    CHECK(us < 200.0);
}

// Budgets: a step that needs more launches than it did fails here.
TEST_CASE("a step has no more launches than its budget", "[gpu-step]") {
    const GpuModel& gpu = gpu_model("h200");
    const auto launches = [&](const char* model, bool tf32) {
        return step_launches(model, 64, tf32, gpu, kNoReports, 0).size();
    };
    CHECK(launches("net", false) <= 32);
    CHECK(launches("wide", true) <= 30);
}

}  // namespace gyre::bench
