// Every CPU kernel at the shapes of `net` and `wide`: time, GFLOP/s or GB/s, and the share of the
// peak of fused multiply-adds measured in the same run on the same core.
//
//   build/bench-kernels [--benchmark_filter=conv] [--benchmark_out=FILE.json]
//
// One thread. "flop" counts what the formula asks for, not what an implementation does. What the
// kernels compute is checked in tests/kernels_test.cpp, over these layers' kinds of shapes.
#include <benchmark/benchmark.h>
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <numeric>
#include <string>
#include <vector>

#include "kernels/backend.hpp"
#include "kernels/cpu/simd.hpp"

namespace {

using namespace gyre;

// GFLOP/s of independent fused multiply-adds that never leave the registers; best of several runs.
double measure_fma_peak() {
    using cpu::Vec;
    constexpr int kChains =
        12;  // latency x throughput of every current core, and fits 16 registers
    double best = 0.0;
    for (int run = 0; run < 10; ++run) {
        Vec acc[kChains];
        for (int i = 0; i < kChains; ++i) {
            acc[i] = cpu::broadcast(1.0f + static_cast<float>(i));
        }
        Vec a = cpu::broadcast(0.999f), b = cpu::broadcast(0.001f);
        benchmark::DoNotOptimize(a);
        benchmark::DoNotOptimize(b);
        constexpr int kRounds = 2'000'000;
        const auto start = std::chrono::steady_clock::now();
        for (int round = 0; round < kRounds; ++round) {
            for (int i = 0; i < kChains; ++i) {
                acc[i] = acc[i] * a + b;
            }
        }
        const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
        Vec sum = acc[0];
        for (int i = 1; i < kChains; ++i) {
            sum += acc[i];
        }
        benchmark::DoNotOptimize(sum);
        best = std::max(best, 2.0 * kRounds * kChains * cpu::kVec / seconds.count() / 1e9);
    }
    return best;
}

struct Buffers {
    Backend& backend;
    // A few values, repeated: arithmetic time does not depend on them as long as they are normal.
    DeviceBuffer<float> activation(const Shape& shape, int n) {
        return filled(backend.activation_elems(shape, n));
    }
    DeviceBuffer<float> filled(std::int64_t elems) {
        DeviceBuffer<float> buffer(backend, elems);
        std::vector<float> host(static_cast<std::size_t>(elems));
        for (std::size_t i = 0; i < host.size(); ++i) {
            host[i] = 0.01f * static_cast<float>(i % 97) - 0.4f;
        }
        backend.upload(buffer.get(), host.data(), buffer.bytes());
        return buffer;
    }
};

class Suite {
 public:
    Suite(Backend& backend, double peak) : backend_(backend), peak_(peak) {}

    void add(const std::string& name, double flop, double bytes, std::function<void()> body) {
        benchmark::RegisterBenchmark(name.c_str(), [=, this](benchmark::State& state) {
            body();
            for (auto _ : state) {
                body();
            }
            const auto rounds = static_cast<double>(state.iterations());
            if (flop > 0) {
                state.counters["GFLOP/s"] =
                    benchmark::Counter(flop * rounds / 1e9, benchmark::Counter::kIsRate);
                state.counters["%peak"] = benchmark::Counter(100.0 * flop * rounds / 1e9 / peak_,
                                                             benchmark::Counter::kIsRate);
            }
            if (bytes > 0) {
                state.counters["GB/s"] =
                    benchmark::Counter(bytes * rounds / 1e9, benchmark::Counter::kIsRate);
            }
        })->Unit(benchmark::kMicrosecond);
    }

    void conv(const std::string& layer, const Conv2dShape& shape, int n, bool input_gradient) {
        Buffers make{backend_};
        auto hold = std::make_shared<std::vector<DeviceBuffer<float>>>();
        hold->push_back(make.activation(shape.in, n));
        hold->push_back(make.activation(shape.out(), n));
        hold->push_back(make.filled(shape.weight_elems()));
        hold->push_back(make.filled(shape.out_channels));
        hold->push_back(make.filled(shape.weight_elems()));
        hold->push_back(make.activation(shape.in, n));
        const auto at = [hold](std::size_t i) { return (*hold)[i].get(); };
        const double flop = static_cast<double>(shape.flop_per_image()) * n;
        Backend* backend = &backend_;
        add(layer + "/forward/" + std::to_string(n), flop, 0,
            [=] { backend->conv2d_forward(shape, n, at(0), at(2), at(3), at(1)); });
        if (input_gradient) {
            add(layer + "/backward_data/" + std::to_string(n), flop, 0,
                [=] { backend->conv2d_backward_data(shape, n, at(1), at(2), at(5)); });
        }
        add(layer + "/backward_weights/" + std::to_string(n), flop, 0,
            [=] { backend->conv2d_backward_weights(shape, n, at(0), at(1), at(4), at(3)); });
    }

    void linear(const std::string& layer, const LinearShape& shape, int n) {
        Buffers make{backend_};
        auto hold = std::make_shared<std::vector<DeviceBuffer<float>>>();
        const Shape in{shape.in_features, 1, 1}, out{shape.out_features, 1, 1};
        hold->push_back(make.activation(in, n));
        hold->push_back(make.activation(out, n));
        hold->push_back(make.filled(shape.weight_elems()));
        hold->push_back(make.filled(shape.out_features));
        hold->push_back(make.filled(shape.weight_elems()));
        hold->push_back(make.activation(in, n));
        const auto at = [hold](std::size_t i) { return (*hold)[i].get(); };
        const double flop = static_cast<double>(shape.flop_per_image()) * n;
        Backend* backend = &backend_;
        add(layer + "/forward/" + std::to_string(n), flop, 0,
            [=] { backend->linear_forward(shape, n, at(0), at(2), at(3), at(1)); });
        add(layer + "/backward_data/" + std::to_string(n), flop, 0,
            [=] { backend->linear_backward_data(shape, n, at(1), at(2), at(5)); });
        add(layer + "/backward_weights/" + std::to_string(n), flop, 0,
            [=] { backend->linear_backward_weights(shape, n, at(0), at(1), at(4), at(3)); });
    }

    void pool(const std::string& layer, const MaxPool2dShape& shape, int n) {
        Buffers make{backend_};
        auto x = std::make_shared<DeviceBuffer<float>>(make.activation(shape.in, n));
        auto y = std::make_shared<DeviceBuffer<float>>(make.activation(shape.out(), n));
        auto dx = std::make_shared<DeviceBuffer<float>>(make.activation(shape.in, n));
        auto argmax = std::make_shared<DeviceBuffer<std::uint8_t>>(
            backend_, backend_.activation_elems(shape.out(), n));
        Backend* backend = &backend_;
        const auto in = static_cast<double>(x->bytes()), out = static_cast<double>(y->bytes());
        add(layer + "/forward/" + std::to_string(n), 0, in + out * 1.25,
            [=] { backend->maxpool2d_forward(shape, n, x->get(), y->get(), argmax->get()); });
        add(layer + "/backward/" + std::to_string(n), 0, in + out * 1.25,
            [=] { backend->maxpool2d_backward(shape, n, x->get(), argmax->get(), y->get(), dx->get()); });
    }

    void pointwise(const std::string& net, const Shape& relu, const Shape& dropout, int n) {
        Buffers make{backend_};
        auto x = std::make_shared<DeviceBuffer<float>>(make.activation(relu, n));
        auto dx = std::make_shared<DeviceBuffer<float>>(make.activation(relu, n));
        auto samples = std::make_shared<DeviceBuffer<std::int32_t>>(backend_, n);
        std::iota(samples->get(), samples->get() + n, 0);
        Backend* backend = &backend_;
        const auto bytes = static_cast<double>(x->bytes());
        add(net + "/relu/forward/" + std::to_string(n), 0, 2 * bytes,
            [=] { backend->relu_forward(relu, n, x->get()); });
        add(net + "/relu/backward/" + std::to_string(n), 0, 3 * bytes,
            [=] { backend->relu_backward(relu, n, x->get(), dx->get()); });
        DropoutArgs args;
        args.stream = {1, RandomPurpose::dropout, 0, 0};
        args.samples = samples->get();
        args.shape = dropout;
        args.probability = 1e-6f;  // almost nothing is dropped, so the values stay normal numbers
        add(net + "/dropout/" + std::to_string(n), 0,
            2.0 * 4.0 * static_cast<double>(backend_.activation_elems(dropout, n)), [=] {
                backend->dropout(args, n, x->get());
                benchmark::DoNotOptimize(samples.get());
            });
    }

    void gather(const std::string& net, const Shape& shape, int n) {
        constexpr int kImages = 4096;
        auto pixels =
            std::make_shared<DeviceBuffer<std::uint8_t>>(backend_, kImages * shape.elems());
        auto labels = std::make_shared<DeviceBuffer<std::int32_t>>(backend_, kImages);
        auto samples = std::make_shared<DeviceBuffer<std::int32_t>>(backend_, n);
        for (int i = 0; i < n; ++i) {
            samples->get()[i] = i * 1237 % kImages;
        }
        auto x =
            std::make_shared<DeviceBuffer<float>>(backend_, backend_.activation_elems(shape, n));
        auto y = std::make_shared<DeviceBuffer<std::int32_t>>(backend_, n);
        Backend* backend = &backend_;
        add(net + "/gather/" + std::to_string(n), 0, 5.0 * static_cast<double>(shape.elems()) * n,
            [=] {
                static const std::vector<float> scale(64, 0.01f), shift(64, -0.4f);
                GatherArgs args{pixels->get(), labels->get(), samples->get(),
                                shape,         scale.data(),  shift.data()};
                backend->gather(args, n, x->get(), y->get());
            });
    }

    void optimisers(const std::string& net, std::int64_t elems) {
        Buffers make{backend_};
        auto hold = std::make_shared<std::vector<DeviceBuffer<float>>>();
        for (int i = 0; i < 4; ++i) {
            hold->push_back(make.filled(elems));
        }
        Backend* backend = &backend_;
        const auto at = [hold](std::size_t i) { return (*hold)[i].get(); };
        backend_.fill_zero(at(3), (*hold)[3].bytes());
        const double bytes = 4.0 * static_cast<double>(elems);
        add(net + "/sgd", 0, 5 * bytes, [=] {
            backend->sgd_step({1e-9f, 0.5f, 0.0f, false}, elems, at(0), at(1), at(2));
        });
        add(net + "/adam", 0, 7 * bytes, [=] {
            AdamArgs args;
            args.learning_rate = 1e-9f;
            backend->adam_step(args, elems, at(0), at(1), at(2), at(3));
        });
    }

 private:
    Backend& backend_;
    double peak_;
};

}  // namespace

int main(int argc, char** argv) {
    benchmark::Initialize(&argc, argv);
    if (benchmark::ReportUnrecognizedArguments(argc, argv)) {
        return 2;
    }
    const double peak = measure_fma_peak();
    benchmark::AddCustomContext("fma_peak_gflops_per_core", fmt::format("{:.1f}", peak));
    const auto backend = gyre::make_cpu_backend(1);
    {
        Suite suite(*backend, peak);
        for (const int n : {64, 256}) {
            suite.gather("net", {1, 28, 28}, n);
            suite.conv("net/conv1", {{1, 28, 28}, 10, 5, 1, 0}, n, false);
            suite.pool("net/pool1", {{10, 24, 24}, 2, 2}, n);
            suite.conv("net/conv2", {{10, 12, 12}, 20, 5, 1, 0}, n, true);
            suite.pool("net/pool2", {{20, 8, 8}, 2, 2}, n);
            suite.pointwise("net", {10, 12, 12}, {50, 1, 1}, n);
            suite.linear("net/fc1", {320, 50}, n);
            suite.linear("net/fc2", {50, 10}, n);
        }
        suite.optimisers("net", 21840);
        suite.conv("wide/conv1", {{1, 28, 28}, 64, 3, 1, 1}, 64, false);
        suite.conv("wide/conv2", {{64, 28, 28}, 128, 3, 1, 1}, 64, true);
        suite.pool("wide/pool1", {{128, 28, 28}, 2, 2}, 64);
        suite.pointwise("wide", {128, 28, 28}, {1024, 1, 1}, 64);
        suite.linear("wide/fc1", {25088, 1024}, 64);
        suite.optimisers("wide", 25'775'882);
        benchmark::RunSpecifiedBenchmarks();
        benchmark::ClearRegisteredBenchmarks();  // they hold the backend's memory
        benchmark::Shutdown();
    }
    return 0;
}
