// The profiler's counts, for kernels whose counts are known.
#include "kernels/emulation/profiler.hpp"

#include <functional>

#include "kernels/emulation/basic_blocks.hpp"
#include "tests/emulation/planted_profiles.hpp"
#include "tests/support/catch.hpp"

namespace simt {
namespace {

constexpr std::size_t kBytes = kProfileFloats * sizeof(float);

class Device {
 public:
    Device() {
        enable_profiler();
        x = static_cast<float*>(allocate(kBytes));
        y = static_cast<float*>(allocate(kBytes));
        stream.fill_zero(x, kBytes);
        stream.fill_zero(y, kBytes);
        stream.synchronize();
        take_profiles();
    }
    ~Device() {
        release(x);
        release(y);
        emulator::set_most_blocks(-1);
        emulator::set_schedule(0);
    }
    Device(const Device&) = delete;
    Device& operator=(const Device&) = delete;

    // The profile of the single launch that `start` makes.
    LaunchProfile profile(const std::function<void()>& start) {
        start();
        stream.synchronize();
        const std::vector<LaunchProfile> profiles = take_profiles();
        REQUIRE(profiles.size() == 1);
        return profiles.front();
    }

    Stream stream;
    float *x, *y;
};

void check_counts(const Traffic& found, int requests, int lanes, int transactions, int least) {
    CHECK(found.requests == requests);
    CHECK(found.lanes == lanes);
    CHECK(found.transactions == transactions);
    CHECK(found.least == least);
}

}  // namespace

TEST_CASE("the profiler counts the sectors of a warp's loads", "[profiler]") {
    Device device;
    for (const std::uint64_t seed : {0, 1, 2}) {
        emulator::set_schedule(seed);
        for (const auto& [stride, sectors] : {std::pair{0, 1}, {1, 4}, {2, 8}, {8, 32}, {32, 32}}) {
            INFO("stride " << stride << ", schedule " << seed);
            const LaunchProfile profile = device.profile(
                [&, s = stride] { start_strided(device.stream, s, device.x, device.y); });
            check_counts(profile.global_loads, 1, 32, sectors, stride == 0 ? 1 : 4);
            check_counts(profile.global_stores, 1, 32, 4, 4);
            CHECK(profile.global_loads.bytes == (stride == 0 ? 4 : 128));
            CHECK(profile.read_bytes == 32.0 * sectors);
            CHECK(profile.written_bytes == 128.0);
        }
    }
    // Shifted by one float, 128 bytes span five sectors.
    check_counts(device.profile([&] { start_strided(device.stream, 1, device.x + 1, device.y); })
                     .global_loads,
                 1, 32, 5, 4);
    const LaunchProfile quads =
        device.profile([&] { start_quads(device.stream, device.x, device.y); });
    check_counts(quads.global_loads, 1, 32, 16, 16);
    check_counts(quads.global_stores, 1, 32, 16, 16);
    CHECK(quads.places.size() == 2);
    CHECK(quads.places.front().bytes == 16);
}

TEST_CASE("the profiler counts active lanes", "[profiler]") {
    Device device;
    for (const int lanes : {1, 8, 16, 31}) {
        const LaunchProfile profile =
            device.profile([&] { start_some_lanes(device.stream, lanes, device.x, device.y); });
        check_counts(profile.global_loads, 1, lanes, (lanes + 7) / 8, (lanes + 7) / 8);
    }
    // Lane i is active i + 1 times: 32 requests of 32, 31, ..., 1 lanes to one word each.
    check_counts(
        device.profile([&] { start_uneven(device.stream, device.x, device.y); }).global_loads, 32,
        32 * 33 / 2, 32, 32);
}

TEST_CASE("the profiler counts the wavefronts of shared memory", "[profiler]") {
    Device device;
    for (const auto& [pad, wavefronts] : {std::pair{0, 32}, {1, 1}, {4, 4}, {8, 8}}) {
        INFO("pad " << pad);
        const LaunchProfile profile =
            device.profile([&, p = pad] { start_column(device.stream, p, device.y); });
        check_counts(profile.shared_loads, 1, 32, wavefronts, 1);
        check_counts(profile.shared_stores, 32, 32 * 32, 32, 32);
        CHECK(profile.barriers == 1);
    }
    check_counts(device.profile([&] { start_broadcast(device.stream, device.y); }).shared_loads, 1,
                 32, 1, 1);
    // Quarters of a warp: 8 lanes access 32 words; with a stride of 8 floats, pairs of them share a
    // bank.
    for (const auto& [stride, wavefronts] : {std::pair{4, 4}, {8, 8}, {0, 4}}) {
        INFO("stride " << stride);
        const LaunchProfile profile =
            device.profile([&, s = stride] { start_shared_quads(device.stream, s, device.y); });
        check_counts(profile.shared_loads, 1, 32, wavefronts, 4);
    }
}

TEST_CASE("the profiler counts reads between blocks of a cluster", "[profiler]") {
    Device device;
    for (const auto& [stride, sectors] : {std::pair{0, 1}, {1, 4}, {2, 8}, {8, 32}}) {
        INFO("stride " << stride);
        const LaunchProfile profile =
            device.profile([&, s = stride] { start_remote_reads(device.stream, s, device.y); });
        check_counts(profile.remote_loads, 4, 4 * 32, 4 * sectors, stride == 0 ? 4 : 16);
        check_counts(profile.shared_loads, 0, 0, 0, 0);
        check_counts(profile.shared_stores, 4 * 8, 4 * 8 * 32, 4 * 8, 4 * 8);
        CHECK(profile.barriers == 0);
        CHECK(profile.cluster_barriers == 8);
        CHECK(profile.remote_phases == 1.0);
        CHECK(profile.blocks == 4);
        CHECK(text_of(profile, "it").find("in clusters of 2") != std::string::npos);
    }
}

TEST_CASE("the profiler counts FLOPs that were executed", "[profiler]") {
    Device device;
    for (const int times : {0, 1, 7, 100}) {
        INFO("times " << times);
        const LaunchProfile profile =
            device.profile([&] { start_arithmetic(device.stream, times, device.x, device.y); });
        CHECK(profile.flop == 2 * 64 * (2 * times + 2));
        CHECK(profile.warp_fmas == 4 * (times + 1));
        CHECK(profile.tensor_flop == 0);
    }
    const LaunchProfile products = device.profile([&] { start_mma(device.stream, device.y); });
    CHECK(products.mmas == 6);
    CHECK(products.tensor_flop == 6 * 2 * 16 * 8 * 8);
    CHECK(products.warp_operations == 6);
    CHECK(products.longest_mmas == 3.0);
}

TEST_CASE("the profiler sees which threads are busy", "[profiler]") {
    Device device;
    double before = 0.0;
    for (const int warps : {1, 2, 4, 8}) {
        const LaunchProfile profile = device.profile(
            [&] { start_few_warps(device.stream, warps, 1000, device.x, device.y); });
        CHECK(profile.busy > 0.95 * warps / 8);
        CHECK(profile.busy < 0.05 + warps / 8.0);
        CHECK(profile.busy > before);
        before = profile.busy;
        CHECK(profile.barriers == 6);
        CHECK(profile.load_phases == 1.0);
        CHECK(profile.longest_fmas == 500.0);
        CHECK(profile.longest_requests == 1001.0);  // of three intervals: 0, 1000 and 1
    }
}

TEST_CASE("the profiler counts each byte of a launch once, and scales partial launches",
          "[profiler]") {
    Device device;
    for (const std::int64_t most : {-1, 4, 2}) {
        INFO("at most " << most << " blocks");
        emulator::set_most_blocks(most);
        const LaunchProfile profile =
            device.profile([&] { start_shared_reads(device.stream, 8, device.x, device.y); });
        CHECK(profile.blocks == (most < 0 ? 8 : most));
        CHECK(profile.read_bytes == 4096.0);
        CHECK(profile.written_bytes == 8 * 1024.0);
        CHECK(profile.scale() * static_cast<double>(profile.flop) == 8 * 256 * 4);
    }
    emulator::set_most_blocks(0);
    const LaunchProfile none =
        device.profile([&] { start_shared_reads(device.stream, 8, device.x, device.y); });
    CHECK(none.launch.grid.x == 8);
    CHECK(none.flop == 0);
}

TEST_CASE("the profiler's text names the worst places", "[profiler]") {
    Device device;
    const std::string text = text_of(
        device.profile([&] { start_strided(device.stream, 32, device.x, device.y); }), "planted");
    INFO(text);
    CHECK(text.find("planted: strided grid (1, 1, 1) block 32") == 0);
    CHECK(text.find("32.0 sectors a request (4.0 would do)") != text.npos);
    CHECK(text.find("planted_profiles.cu:") != text.npos);
    const std::string good = text_of(
        device.profile([&] { start_strided(device.stream, 1, device.x, device.y); }), "planted");
    CHECK(good.find("planted_profiles.cu:") == good.npos);
}

TEST_CASE("instructions have one FLOP per element, fused ones two", "[profiler]") {
    CHECK(flop_of("mulss  %xmm0,%xmm1") == 1);
    CHECK(flop_of("vfmadd231ss %xmm0,%xmm1,%xmm2") == 2);
    CHECK(flop_of("vfnmadd132sd (%rax),%xmm1,%xmm2") == 2);
    CHECK(flop_of("addps  (%rax),%xmm1") == 4);
    CHECK(flop_of("vmulps %ymm0,%ymm1,%ymm2") == 8);
    CHECK(flop_of("vfmadd213pd %zmm0,%zmm1,%zmm2") == 16);
    CHECK(flop_of("sqrtss %xmm0,%xmm0") == 1);
    CHECK(flop_of("call   12345 <fmaf@plt>") == 2);
    for (const char* other : {"add    $0x8,%rsp", "movss  %xmm0,(%rax)", "maxss  %xmm0,%xmm1",
                              "ret", "call   12345 <expf@plt>", "subsd", "cvtss2sd %xmm0,%xmm0"}) {
        INFO(other);
        CHECK(flop_of(other) == (std::string(other) == "subsd" ? 1 : 0));
    }
}

}  // namespace simt
