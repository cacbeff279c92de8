// The emulator reports the bugs planted in kernels, and nothing in the same kernels without bugs.
//
// Compiled for the plain emulator, for AddressSanitizer and UndefinedBehaviorSanitizer, whose
// reports end the process (so these bugs run in a child), and with SIMT_CHECKER for the checker.
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <csignal>
#include <fstream>
#include <functional>
#include <numeric>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "base/error.hpp"
#include "kernels/emulation/emulator.hpp"
#include "tests/emulation/planted_bugs.hpp"
#include "tests/support/built_file.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/expect_error.hpp"

namespace simt {
namespace {

#if defined(SIMT_CHECKER)
constexpr bool kChecker = true, kSanitizer = false;
#elif defined(__SANITIZE_ADDRESS__)
constexpr bool kChecker = false, kSanitizer = true;
#else
constexpr bool kChecker = false, kSanitizer = false;
#endif
constexpr std::size_t kBytes = kPlantedFloats * sizeof(float);
constexpr std::uint64_t kSeeds = 10;

struct Device {
    Device() {
        x = static_cast<float*>(allocate(kBytes));
        y = static_cast<float*>(allocate(kBytes));
        std::vector<float> host(kPlantedFloats);
        std::iota(host.begin(), host.end(), 0.0f);
        stream.upload(x, host.data(), kBytes);
        stream.fill_zero(y, kBytes);
        stream.synchronize();
    }
    ~Device() {
        release(x);
        release(y);
        emulator::set_schedule(0);
    }
    Device(const Device&) = delete;
    Device& operator=(const Device&) = delete;

    std::vector<float> result() {
        std::vector<float> host(kPlantedFloats);
        stream.download(host.data(), y, kBytes);
        stream.synchronize();
        return host;
    }

    float *x, *y;
    Stream stream;
};

// The kernel's result y, or the report.
struct Outcome {
    std::vector<float> y;
    std::string report;
};
Outcome run(const PlantedBug& bug, bool planted, std::uint64_t seed) {
    Device device;
    emulator::set_schedule(seed);
    try {
        bug.start(device.stream, planted, device.x, device.y);
        return {device.result(), ""};
    } catch (const gyre::Error& error) {
        return {{}, error.what()};
    }
}

// The output of a child process that runs `work`; empty if it completes.
std::optional<std::string> death_of(const std::function<void()>& work) {
    std::array<int, 2> ends{};
    REQUIRE(pipe(ends.data()) == 0);
    const pid_t child = fork();
    REQUIRE(child >= 0);
    if (child == 0) {
        std::signal(SIGABRT, SIG_DFL);  // Catch2 installs its own
        dup2(ends[1], STDOUT_FILENO);
        dup2(ends[1], STDERR_FILENO);
        close(ends[0]);
        work();
        _exit(0);
    }
    close(ends[1]);
    std::string text;
    std::array<char, 4096> part{};
    for (ssize_t n; (n = read(ends[0], part.data(), part.size())) > 0;) {
        text.append(part.data(), static_cast<std::size_t>(n));
    }
    close(ends[0]);
    int status = 0;
    REQUIRE(waitpid(child, &status, 0) == child);
    return status == 0 ? std::nullopt : std::optional(text);
}

// "planted_bugs.cu:<line>", or the same of planted_clusters.cu, for the line that ends with this
// comment; empty if there is none.
std::string place_of(const std::string& comment) {
    for (const std::string name : {"planted_bugs.cu", "planted_clusters.cu"}) {
        std::ifstream source(gyre::test::built_file("tests/" + name));
        REQUIRE(source);
        std::string text;
        for (int line = 1; std::getline(source, text); ++line) {
            const std::string end = "// " + comment;
            if (text.size() > end.size() && text.substr(text.size() - end.size()) == end) {
                return name + ":" + std::to_string(line);
            }
        }
    }
    return "";
}

// Returns whether the text contains the place, not followed by another digit.
bool names(const std::string& text, const std::string& place) {
    for (std::size_t at = 0; (at = text.find(place, at)) != text.npos; ++at) {
        const std::size_t end = at + place.size();
        if (end == text.size() || text[end] < '0' || text[end] > '9') {
            return true;
        }
    }
    return false;
}

}  // namespace

TEST_CASE("the emulator finds planted bugs", "[emulation]") {
    for (const PlantedBug& bug : planted_bugs()) {
        const bool dies = kSanitizer && bug.finder == Finder::address_sanitizer;
        if (bug.finder != Finder::emulator && !kChecker && !dies) {
            continue;
        }
        const std::string here = place_of("bug: " + bug.name),
                          there = place_of("other: " + bug.name);
        for (std::uint64_t seed = 0; seed < (dies ? 1 : kSeeds); ++seed) {
            INFO("bug: " << bug.name << ", seed " << seed);
            const std::string report = dies ? death_of([&] { run(bug, true, seed); }).value_or("")
                                            : run(bug, true, seed).report;
            INFO("report: " << report);
            CHECK(!report.empty());
            CHECK((here.empty() || names(report, here)));
            CHECK((there.empty() || names(report, there)));
            if (!dies) {
                CHECK(report.find("planted") != report.npos);
                for (const std::string& word : bug.words) {
                    INFO("expected to contain: " << word);
                    CHECK(report.find(word) != report.npos);
                }
            }
        }
    }
}

TEST_CASE("the emulator finds nothing in correct kernels", "[emulation]") {
    for (const PlantedBug& bug : planted_bugs()) {
        const std::vector<float> first = run(bug, false, 0).y;
        for (std::uint64_t seed = 0; seed < kSeeds; ++seed) {
            INFO("without the bug: " << bug.name << ", seed " << seed);
            const Outcome outcome = run(bug, false, seed);
            CHECK(outcome.report == "");
            CHECK(outcome.y == first);
        }
    }
}

TEST_CASE("an emulated stream that does not wait reads stale data", "[emulation]") {
    for (const bool wait : {true, false}) {
        Device device;
        Stream other;
        start_scale(other, 2.0f, device.x, device.y);
        Event done;
        other.record(done);
        if (wait) {
            device.stream.wait(done);
        }
        CHECK(device.result()[3] == (wait ? 6.0f : 0.0f));
        other.synchronize();
        CHECK(device.result()[3] == 6.0f);
    }
}

TEST_CASE("an emulated stream waits for an event's earlier records, not later ones",
          "[emulation]") {
    Device device;
    Stream other;
    Event done;
    start_scale(other, 2.0f, device.x, device.y);
    other.record(done);
    device.stream.wait(done);
    start_scale(other, 3.0f, device.x, device.y);
    other.record(done);
    CHECK(device.result()[3] == 6.0f);
    done.synchronize();
    CHECK(device.result()[3] == 9.0f);
}

TEST_CASE("a second thread is refused while a first one uses the emulated GPU", "[emulation]") {
    std::exception_ptr thrown;
    const auto allocates = [&] {
        thrown = nullptr;
        std::thread([&] {
            try {
                release(allocate(100));
            } catch (...) {
                thrown = std::current_exception();
            }
        }).join();
    };
    {
        const Device device;
        allocates();
        REQUIRE(thrown != nullptr);
        gyre::test::expect_error(gyre::ExitCode::internal,
                                 {"two threads use the emulated GPU at once"},
                                 [&] { std::rethrow_exception(thrown); });
    }
    allocates();
    CHECK(thrown == nullptr);
}

#if defined(SIMT_CHECKER)
TEST_CASE("the checker finds host code that touches device memory", "[emulation]") {
    const auto report = death_of([] {
        Device device;
        touch_from_host(device.x);
    });
    INFO(report.value_or("(none)"));
    REQUIRE(report.has_value());
    CHECK(report->find("host code touches device memory") != std::string::npos);
    CHECK(names(*report, place_of("bug: host")));
}

TEST_CASE("the checker follows copies", "[emulation]") {
    Device device;
    auto* memory = static_cast<std::byte*>(allocate(100));
    const auto report = [&](const auto& work) -> std::string {
        Stream stream;
        try {
            work(stream);
            stream.synchronize();
            return "";
        } catch (const gyre::Error& error) {
            return error.what();
        }
    };
    std::array<std::byte, 128> host{};
    const auto contains = [](const std::string& text, const char* part) {
        INFO(text);
        return text.find(part) != text.npos;
    };
    CHECK(contains(report([&](Stream& s) { s.download(host.data(), memory, 100); }),
                   "reads what nobody wrote, at offset 0 of device memory of 100 bytes"));
    CHECK(report([&](Stream& s) {
              s.upload(memory, host.data(), 50);
              s.fill_zero(memory + 50, 49);
              s.download(host.data(), memory, 99);
          }) == "");
    CHECK(contains(report([&](Stream& s) { s.download(host.data(), memory, 100); }),
                   "reads what nobody wrote, at offset 96"));
    CHECK(contains(report([&](Stream& s) { s.fill_zero(memory, 104); }),
                   "writes outside allocations, 0 bytes behind the end of device memory of 100"));
    release(memory);
    CHECK(contains(report([&](Stream& s) { s.copy(device.y, memory, 4); }),
                   "at offset 0 of released device memory of 100 bytes"));
}
#endif

}  // namespace simt
