// Every CPU kernel: time, GFLOP/s or GB/s, and the share of the peak of fused multiply-adds
// measured in the same run on the same core.
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

#include "bench/kernels.hpp"
#include "kernels/backend.hpp"
#include "kernels/cpu/simd.hpp"

namespace gyre::bench {
namespace {

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

class Suite {
 public:
    Suite(Backend& backend, double peak) : backend_(backend), peak_(peak) {}

    void operator()(const std::string& layer, const GatherWork& work, int n) {
        constexpr int kImages = 4096;
        const Shape shape = work.shape;
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
        add(layer + "/gather/" + std::to_string(n), 0, 5.0 * static_cast<double>(shape.elems()) * n,
            [=] {
                static const std::vector<float> scale(64, 0.01f), shift(64, -0.4f);
                GatherArgs args{pixels->get(), labels->get(), samples->get(),
                                shape,         scale.data(),  shift.data()};
                backend->gather(args, n, x->get(), y->get());
            });
    }

    void operator()(const std::string& layer, const ConvWork& work, int n) {
        const Conv2dShape shape = work.shape;
        const auto at =
            operands(shape.in, shape.out(), shape.weight_elems(), shape.out_channels, n);
        const double flop = static_cast<double>(shape.flop_per_image()) * n;
        Backend* backend = &backend_;
        add(layer + "/forward/" + std::to_string(n), flop, 0,
            [=] { backend->conv2d_forward(shape, n, at(0), at(2), at(3), at(1)); });
        if (work.input_gradient) {
            add(layer + "/backward_data/" + std::to_string(n), flop, 0,
                [=] { backend->conv2d_backward_data(shape, n, at(1), at(2), at(5)); });
        }
        add(layer + "/backward_weights/" + std::to_string(n), flop, 0,
            [=] { backend->conv2d_backward_weights(shape, n, at(0), at(1), at(4), at(3)); });
    }

    void operator()(const std::string& layer, const LinearWork& work, int n) {
        const LinearShape shape = work.shape;
        const auto at = operands({shape.in_features, 1, 1}, {shape.out_features, 1, 1},
                                 shape.weight_elems(), shape.out_features, n);
        const double flop = static_cast<double>(shape.flop_per_image()) * n;
        Backend* backend = &backend_;
        add(layer + "/forward/" + std::to_string(n), flop, 0,
            [=] { backend->linear_forward(shape, n, at(0), at(2), at(3), at(1)); });
        add(layer + "/backward_data/" + std::to_string(n), flop, 0,
            [=] { backend->linear_backward_data(shape, n, at(1), at(2), at(5)); });
        add(layer + "/backward_weights/" + std::to_string(n), flop, 0,
            [=] { backend->linear_backward_weights(shape, n, at(0), at(1), at(4), at(3)); });
    }

    void operator()(const std::string& layer, const PoolWork& work, int n) {
        const MaxPool2dShape shape = work.shape;
        auto x = std::make_shared<DeviceBuffer<float>>(activation(shape.in, n));
        auto y = std::make_shared<DeviceBuffer<float>>(activation(shape.out(), n));
        auto dx = std::make_shared<DeviceBuffer<float>>(activation(shape.in, n));
        auto argmax = std::make_shared<DeviceBuffer<std::uint8_t>>(
            backend_, backend_.activation_elems(shape.out(), n));
        Backend* backend = &backend_;
        const auto in = static_cast<double>(x->bytes()), out = static_cast<double>(y->bytes());
        add(layer + "/forward/" + std::to_string(n), 0, in + out * 1.25,
            [=] { backend->maxpool2d_forward(shape, n, x->get(), y->get(), argmax->get()); });
        add(layer + "/backward/" + std::to_string(n), 0, in + out * 1.25, [=] {
            backend->maxpool2d_backward(shape, n, x->get(), argmax->get(), y->get(), dx->get());
        });
    }

    void operator()(const std::string& layer, const ReluWork& work, int n) {
        const Shape shape = work.shape;
        auto y = std::make_shared<DeviceBuffer<float>>(activation(shape, n));
        auto dy = std::make_shared<DeviceBuffer<float>>(activation(shape, n));
        Backend* backend = &backend_;
        const auto bytes = static_cast<double>(y->bytes());
        add(layer + "/forward/" + std::to_string(n), 0, 2 * bytes,
            [=] { backend->relu_forward(shape, n, y->get()); });
        add(layer + "/backward/" + std::to_string(n), 0, 3 * bytes,
            [=] { backend->relu_backward(shape, n, y->get(), dy->get()); });
    }

    void operator()(const std::string& layer, const DropoutWork& work, int n) {
        auto x = std::make_shared<DeviceBuffer<float>>(activation(work.shape, n));
        auto samples = std::make_shared<DeviceBuffer<std::int32_t>>(backend_, n);
        std::iota(samples->get(), samples->get() + n, 0);
        DropoutArgs args;
        args.stream = {1, RandomPurpose::dropout, 0, 0};
        args.samples = samples->get();
        args.shape = work.shape;
        args.by_channel = work.by_channel;
        args.probability = 1e-6f;  // almost nothing is dropped, so the values stay normal numbers
        Backend* backend = &backend_;
        add(layer + "/dropout/" + std::to_string(n), 0, 2.0 * static_cast<double>(x->bytes()), [=] {
            backend->dropout(args, n, x->get());
            benchmark::DoNotOptimize(samples.get());
        });
    }

    void operator()(const std::string& layer, const LossWork& work, int n) {
        const Shape shape{work.classes, 1, 1};
        auto logits = std::make_shared<DeviceBuffer<float>>(activation(shape, n));
        auto gradient = std::make_shared<DeviceBuffer<float>>(activation(shape, n));
        auto labels = std::make_shared<DeviceBuffer<std::int32_t>>(backend_, n);
        auto sums = std::make_shared<DeviceBuffer<float>>(backend_, 2);
        const CrossEntropyArgs args{work.classes, logits->get(),   labels->get(),
                                    0.01f,        gradient->get(), sums->get()};
        Backend* backend = &backend_;
        add(layer + "/both/" + std::to_string(n), 0, 2.0 * static_cast<double>(logits->bytes()),
            [=] {
                backend->cross_entropy(args, n);
                benchmark::DoNotOptimize(logits.get());
                benchmark::DoNotOptimize(gradient.get());
                benchmark::DoNotOptimize(labels.get());
                benchmark::DoNotOptimize(sums.get());
            });
    }

    void operator()(const std::string& layer, const ParameterWork& work, int) {
        const std::int64_t elems = work.elems;
        auto hold = std::make_shared<std::vector<DeviceBuffer<float>>>();
        for (int i = 0; i < 4; ++i) {
            hold->push_back(filled(elems));
        }
        Backend* backend = &backend_;
        const auto at = [hold](std::size_t i) { return (*hold)[i].get(); };
        backend_.fill_zero(at(3), (*hold)[3].bytes());
        const double bytes = 4.0 * static_cast<double>(elems);
        add(layer + "/sgd", 0, 5 * bytes, [=] {
            backend->sgd_step({1e-9f, 0.5f, 0.0f, false, {}}, elems, at(0), at(1), at(2));
        });
        const auto state = std::make_shared<DeviceBuffer<AdamState>>(backend_, 1);
        add(layer + "/adam", 0, 7 * bytes, [=] {
            AdamArgs args;
            args.learning_rate = 1e-9f;
            args.state = state->get();
            backend->adam_step(args, elems, at(0), at(1), at(2), at(3));
        });
    }

 private:
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

    // Input, output, weights, bias, the weights' gradient and the input's.
    using Operands = std::function<float*(std::size_t)>;
    Operands operands(const Shape& in, const Shape& out, std::int64_t weights, std::int64_t bias,
                      int n) {
        auto hold = std::make_shared<std::vector<DeviceBuffer<float>>>();
        hold->push_back(activation(in, n));
        hold->push_back(activation(out, n));
        hold->push_back(filled(weights));
        hold->push_back(filled(bias));
        hold->push_back(filled(weights));
        hold->push_back(activation(in, n));
        return [hold](std::size_t i) { return (*hold)[i].get(); };
    }
    DeviceBuffer<float> activation(const Shape& shape, int n) {
        return filled(backend_.activation_elems(shape, n));
    }
    // A few values, repeated: arithmetic time does not depend on them as long as they are normal.
    DeviceBuffer<float> filled(std::int64_t elems) {
        DeviceBuffer<float> buffer(backend_, elems);
        std::vector<float> host(static_cast<std::size_t>(elems));
        for (std::size_t i = 0; i < host.size(); ++i) {
            host[i] = 0.01f * static_cast<float>(i % 97) - 0.4f;
        }
        backend_.upload(buffer.get(), host.data(), buffer.bytes());
        return buffer;
    }

    Backend& backend_;
    double peak_;
};

}  // namespace

int run_on_cpu(const Options& options) {
    const double peak = measure_fma_peak();
    benchmark::AddCustomContext("fma_peak_gflops_per_core", fmt::format("{:.1f}", peak));
    const auto backend = make_cpu_backend(1);
    Suite suite(*backend, peak);
    for (const Net& net : nets()) {
        std::vector<int> batches = options.batches;
        if (batches.empty()) {
            batches = net.name == "wide" ? std::vector{64} : std::vector{64, 256};
        }
        for (const int n : batches) {
            for (const Layer& layer : net.layers) {
                if (n == batches[0] || !std::holds_alternative<ParameterWork>(layer.work)) {
                    std::visit(
                        [&](const auto& work) { suite(net.name + "/" + layer.name, work, n); },
                        layer.work);
                }
            }
        }
    }
    const bool any = benchmark::RunSpecifiedBenchmarks() > 0;
    benchmark::ClearRegisteredBenchmarks();  // they hold the backend's memory
    return any ? 0 : 2;
}

}  // namespace gyre::bench
