#include "tests/support/backends.hpp"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <limits>
#include <set>

#include "base/philox.hpp"
#include "kernels/choose_cpu_kernels.hpp"
#include "kernels/emulation/emulator.hpp"
#include "tests/support/catch.hpp"

namespace gyre::test {

Floats random_floats(std::int64_t elems, std::uint32_t stream) {
    const RandomStream random{2026, RandomPurpose::init, stream, 0};
    Floats values(static_cast<std::size_t>(elems));
    for (std::size_t i = 0; i < values.size(); ++i) {
        values[i] = 2.0f * uniform01(random.word(0, static_cast<std::uint32_t>(i))) - 1.0f;
    }
    return values;
}

Guarded::Guarded(Backend& backend, std::int64_t elems)
    : backend_(backend), elems_(elems), buffer_(backend, elems + 2 * kGuard) {
    std::vector<float> poison(static_cast<std::size_t>(elems + 2 * kGuard),
                              std::numeric_limits<float>::quiet_NaN());
    std::fill_n(poison.begin(), kGuard, kCanary);
    std::fill_n(poison.end() - kGuard, kGuard, kCanary);
    backend.upload(buffer_.get(), poison.data(), buffer_.bytes());
}

Guarded::~Guarded() {
    if (buffer_.get() == nullptr || std::uncaught_exceptions() > 0) {
        return;  // moved from; or the test has failed, and the device may be unusable
    }
    std::vector<float> all(static_cast<std::size_t>(buffer_.elems()));
    backend_.download(all.data(), buffer_.get(), buffer_.bytes());
    for (int i = 0; i < kGuard; ++i) {
        CHECK(all[static_cast<std::size_t>(i)] == kCanary);
        CHECK(all[all.size() - 1 - static_cast<std::size_t>(i)] == kCanary);
    }
}

Floats Guarded::download() const {
    Floats values(static_cast<std::size_t>(elems_));
    backend_.download(values.data(), get(), values.size() * sizeof(float));
    return values;
}

Guarded Bench::vector(const Floats& values) {
    Guarded device(backend, static_cast<std::int64_t>(values.size()));
    backend.upload(device.get(), values.data(), values.size() * sizeof(float));
    return device;
}

Guarded Bench::activation(const Shape& shape, int n, const Floats& values) {
    Guarded device(backend, backend.activation_elems(shape, n));
    backend.import_activation(shape, n, values.data(), device.get());
    return device;
}

Floats Bench::read(const Shape& shape, int n, const Guarded& device) {
    Floats values(static_cast<std::size_t>(n * shape.elems()));
    backend.export_activation(shape, n, device.get(), values.data());
    return values;
}

void Bench::check_close(const Floats& found, const Sums& expected, bool filtered) const {
    REQUIRE(found.size() == expected.value.size());
    const bool by_norm = normwise || (filtered && may_filter);
    const double roundings = Sums::rounding(normwise ? kTransformRoundings : kFilterRoundings);
    std::size_t wrong = 0, first = 0;
    double errors = 0.0, bounds = 0.0;
    for (std::size_t i = 0; i < found.size(); ++i) {
        const double error = std::abs(double{found[i]} - expected.value[i]);
        double bound = expected.bound(i) + product_error * expected.magnitude[i];
        if (by_norm) {
            bound = std::max(bound, roundings * expected.magnitude[i]);
        }
        errors += error * error;
        bounds += bound * bound;
        // Written such that NaN fails.
        if (!(error <= bound)) {
            first = wrong++ == 0 ? i : first;
        }
    }
    if (by_norm) {
        INFO("norm of the errors " << std::sqrt(errors) << ", bound " << std::sqrt(bounds));
        CHECK(errors <= bounds);
        return;
    }
    INFO("first wrong element " << first << ": " << (wrong ? found[first] : 0.0f) << ", expected "
                                << (wrong ? expected.value[first] : 0.0) << " to within "
                                << (wrong ? expected.bound(first) : 0.0));
    CHECK(wrong == 0);
}

double dot(const Floats& a, const Floats& b) {
    double sum = 0.0;
    for (std::size_t i = 0; i < a.size(); ++i) {
        sum += double{a[i]} * double{b[i]};
    }
    return sum;
}

double norm(const Floats& a) {
    return std::sqrt(dot(a, a));
}

namespace {

void run(std::unique_ptr<Backend> backend, const GpuOptions& options,
         const std::function<void(Bench&)>& test) {
    INFO("backend: " << backend->description());
    Bench bench(*backend);
    // With 11 bits of significand, each operand has an error of at most 2^-11.
    bench.product_error = options.tf32 ? 2 * 0x1p-11 + 0x1p-22 : 0.0;
    bench.may_filter = backend->description().starts_with("CPU");
    bench.normwise = options.kernels == KernelSet::library;
    test(bench);
}

// Returns whether GYRE_TEST_BACKENDS selects this kind, or is not set.
bool wanted(const std::string& kind) {
    const char* const only = std::getenv("GYRE_TEST_BACKENDS");
    REQUIRE((only == nullptr || std::set<std::string>{"cpu", "emulated", "gpu"}.contains(only)));
    return only == nullptr || kind == only;
}

// True if each case is to run once: on the emulated GPU under one schedule and without TF32, on the
// CPU with several threads only.
bool once() {
    return std::getenv("GYRE_TEST_ONCE") != nullptr;
}

void on_schedules(std::initializer_list<std::uint64_t> seeds, const GpuOptions& options,
                  const std::function<void(Bench&)>& test) {
    for (const std::uint64_t seed : seeds) {
        if (once() && seed != *seeds.begin()) {
            break;
        }
        INFO("schedule " << seed);
        simt::emulator::set_schedule(seed);
        run(make_emulated_backend(options), options, test);
    }
    simt::emulator::set_schedule(0);
}

}  // namespace

bool gpu_wanted() {
    if (!wanted("gpu")) {
        return false;
    }
    if (cuda_device_count() == 0) {
        REQUIRE(std::getenv("GYRE_TEST_BACKENDS") == nullptr);
        static const int said = std::printf("skipped: the backends on a GPU (none was found)\n");
        static_cast<void>(said);
        return false;
    }
    return true;
}

std::vector<int> cpu_threads() {
    return once() ? std::vector{3} : std::vector{1, 3};
}

void on_every_backend(const std::function<void(Bench&)>& test) {
    GpuOptions exact, tf32;
    tf32.tf32 = true;
    if (wanted("emulated")) {
        on_schedules({0, 1, 2}, exact, test);
        if (!once()) {
            on_schedules({0}, tf32, test);
        }
    }
#if !defined(SIMT_CHECKER)
    for (const CpuKernels* const kernels : available_cpu_kernels()) {
        for (const int threads : cpu_threads()) {
            if (wanted("cpu")) {
                run(make_cpu_backend(*kernels, threads), exact, test);
            }
        }
    }
    if (gpu_wanted()) {
        run(make_cuda_backend(exact), exact, test);
        run(make_cuda_backend(tf32), tf32, test);
        GpuOptions library;
        library.kernels = KernelSet::library;
        library.deterministic = true;
        run(make_cuda_backend(library), library, test);
    }
#endif
}

void on_tensor_cores(const std::function<void(Bench&)>& test,
                     std::initializer_list<std::uint64_t> schedules) {
    GpuOptions options;
    options.tf32 = true;
    if (wanted("emulated")) {
        on_schedules(schedules, options, test);
    }
#if !defined(SIMT_CHECKER)
    if (gpu_wanted()) {
        run(make_cuda_backend(options), options, test);
    }
#endif
}

}  // namespace gyre::test
