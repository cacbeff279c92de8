// Measures every CPU kernel on one thread: time, GFLOP/s or GB/s, and the share of the peak of
// fused multiply-adds measured in the same run on the same core.
//
// Rows such as conv1+relu1 are fused operations. "flop" counts the operations of the formula, not
// those of an implementation. tests/kernels/products_test.cpp and tests/kernels/kernels_test.cpp
// check the results of the kernels for shapes like those of these layers.
#include <benchmark/benchmark.h>
#include <fmt/format.h>

#include <algorithm>
#include <functional>
#include <numeric>
#include <string>
#include <vector>

#include "bench/kernels.hpp"
#include "kernels/choose_cpu_kernels.hpp"
#include "kernels/make_backend.hpp"

namespace gyre::bench {
namespace {

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
        add_product(layer, Conv2dSpec{.shape = work.shape}, n, work.input_gradient);
    }
    void operator()(const std::string& layer, const LinearWork& work, int n) {
        add_product(layer, spec_of(work), n, true);
    }

    // Adds the operation that fuses as many of layers [at, ...) as possible, if the first is a
    // convolution or a linear layer; FLOPs are only those of the product.
    void add_fused(const Net& net, std::size_t at, int n) {
        const auto* conv = std::get_if<ConvWork>(&net.layers[at].work);
        const auto* linear = std::get_if<LinearWork>(&net.layers[at].work);
        if (conv == nullptr && linear == nullptr) {
            return;
        }
        std::string name = net.name + "/" + net.layers[at].name;
        Conv2dSpec conv_spec{.shape = conv ? conv->shape : Conv2dShape{}};
        LinearSpec linear_spec = linear ? spec_of(*linear) : LinearSpec{};
        for (++at; at < net.layers.size(); ++at) {
            const Work& next = net.layers[at].work;
            const auto* pool = std::get_if<PoolWork>(&next);
            const auto* dropout = std::get_if<DropoutWork>(&next);
            if (std::holds_alternative<ReluWork>(next)) {
                (conv ? conv_spec.relu : linear_spec.relu) = true;
            } else if (conv && pool) {
                conv_spec.pool_kernel = pool->shape.kernel;
                conv_spec.pool_stride = pool->shape.stride;
            } else if (conv && dropout && dropout->by_channel) {
                conv_spec.dropout = 0.5f;
            } else {
                break;
            }
            name += "+" + net.layers[at].name;
        }
        if (conv_spec.fused()) {
            add_product(name, conv_spec, n, conv->input_gradient);
        } else if (linear_spec.fused()) {
            add_product(name, linear_spec, n, true);
        }
    }

    void operator()(const std::string& layer, const PoolWork& work, int n) {
        const auto run = operation(MaxPool2dSpec{work.shape}, work.shape.in, work.shape.out(), n);
        const double bytes = run->bytes(work.shape.in) + 1.25 * run->bytes(work.shape.out());
        add(layer + "/forward/" + std::to_string(n), 0, bytes, [=] { run->forward(); });
        add(layer + "/backward/" + std::to_string(n), 0, bytes, [=] { run->backward_input(); });
    }

    void operator()(const std::string& layer, const ReluWork& work, int n) {
        const auto run = operation(ReluSpec{work.shape}, work.shape, work.shape, n);
        const double bytes = run->bytes(work.shape);
        add(layer + "/forward/" + std::to_string(n), 0, 2 * bytes, [=] { run->forward(); });
        add(layer + "/backward/" + std::to_string(n), 0, 3 * bytes, [=] { run->backward_input(); });
    }

    void operator()(const std::string& layer, const AvgPoolWork& work, int n) {
        const Shape &in = work.spec.in, out = work.spec.out();
        const auto run = operation(work.spec, in, out, n);
        const double bytes = run->bytes(in) + run->bytes(out);
        add(layer + "/forward/" + std::to_string(n), 0, bytes, [=] { run->forward(); });
        add(layer + "/backward/" + std::to_string(n), 0, bytes, [=] { run->backward_input(); });
    }

    // The data is read once for the statistics or sums, and once more for the result.
    void operator()(const std::string& layer, const BatchNormWork& work, int n) {
        const Shape& shape = work.shape;
        const auto run = operation(BatchNorm2dSpec{.in = shape}, shape, shape, n);
        run->hold_parameters(shape.channels, shape.channels);
        run->io.dy = run->keep(activation(shape, n));
        run->io.state = {run->keep(filled(shape.channels)), run->keep(filled(shape.channels))};
        std::fill_n(run->io.state[1].f32(), shape.channels, 1.0f);  // a variance
        run->forward();  // the backward pass needs its results
        const double bytes = run->bytes(shape);
        add(layer + "/forward/" + std::to_string(n), 0, 3 * bytes, [=] { run->forward(); });
        add(layer + "/evaluation/" + std::to_string(n), 0, 2 * bytes, [=] {
            Batch batch = run->batch;
            batch.training = false;
            run->op->forward(batch, run->io);
        });
        add(layer + "/backward/" + std::to_string(n), 0, 5 * bytes, [=] {
            run->backward_begin();
            run->backward_params();
            run->backward_input();
        });
    }

    // The gradient passes to both inputs unchanged.
    void operator()(const std::string& layer, const AddWork& work, int n) {
        const auto run = operation(AddSpec{work.shape}, work.shape, work.shape, n);
        run->io.x2 = run->keep(activation(work.shape, n));
        add(layer + "/forward/" + std::to_string(n), 0, 3 * run->bytes(work.shape),
            [=] { run->forward(); });
    }

    void operator()(const std::string& layer, const DropoutWork& work, int n) {
        // Almost nothing is dropped, so the values stay normal numbers.
        const DropoutSpec spec{
            .in = work.shape, .probability = 1e-6f, .by_channel = work.by_channel};
        const auto run = operation(spec, work.shape, work.shape, n);
        add(layer + "/dropout/" + std::to_string(n), 0, 2 * run->bytes(work.shape), [=] {
            run->forward();
            benchmark::DoNotOptimize(run.get());
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
        const auto scalars = std::make_shared<DeviceBuffer<StepScalars>>(backend_, 1);
        const StepScalars small = {.learning_rate = 1e-9f,
                                   .adam_step_size = 1e-9f,
                                   .adam_correction = 1.0f,
                                   .shrink = 1.0f};
        backend_.upload(scalars->get(), &small, sizeof small);
        add(layer + "/sgd", 0, 5 * bytes, [=] {
            backend->update({.formula = Formula::sgd_momentum,
                             .scalars = scalars->get(),
                             .momentum = 0.5f,
                             .states = {at(2)}},
                            elems, at(0), at(1));
        });
        add(layer + "/adam", 0, 7 * bytes, [=] {
            backend->update(
                {.formula = Formula::adam, .scalars = scalars->get(), .states = {at(2), at(3)}},
                elems, at(0), at(1));
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

    // An operation with its operands.
    struct Operation {
        Operation(Suite& suite_, const OpSpec& spec, int n)
            : suite(suite_),
              samples(suite.backend_, n),
              op(suite.backend_.make("layer", spec, {.train_images = n})),
              saved(suite.backend_, static_cast<std::int64_t>(op->needs().saved_bytes)) {
            std::iota(samples.get(), samples.get() + n, 0);
            batch = {.n = n, .training = true, .samples = samples.get(), .seed = 1};
            io.saved = saved.get();
        }
        float* keep(DeviceBuffer<float> buffer) {
            hold.push_back(std::move(buffer));
            return hold.back().get();
        }
        void hold_parameters(std::int64_t weights, std::int64_t biases) {
            io.params = {keep(suite.filled(weights)), keep(suite.filled(biases))};
            io.grads = {keep(suite.filled(weights)), keep(suite.filled(biases))};
        }
        double bytes(const Shape& shape) const {
            return sizeof(float) *
                   static_cast<double>(suite.backend_.activation_elems(shape, batch.n));
        }
        void forward() const { op->forward(batch, io); }
        void backward_begin() const { op->backward_begin(batch, io); }
        void backward_params() const { op->backward_params(batch, io); }
        void backward_input() const { op->backward_input(batch, io); }

        Suite& suite;
        DeviceBuffer<std::int32_t> samples;
        std::unique_ptr<Op> op;
        DeviceBuffer<std::uint8_t> saved;
        std::vector<DeviceBuffer<float>> hold;
        Batch batch;
        OpIo io;
    };
    std::shared_ptr<Operation> operation(const OpSpec& spec, const Shape& in, const Shape& out,
                                         int n) {
        auto run = std::make_shared<Operation>(*this, spec, n);
        OpIo& io = run->io;
        io.x = run->keep(activation(in, n));
        io.dx = run->keep(activation(in, n));
        const bool in_place = run->op->needs().in_place;
        io.y = in_place ? io.x : Tensor(run->keep(activation(out, n)));
        io.dy = in_place ? io.dx : io.y;
        return run;
    }
    static LinearSpec spec_of(const LinearWork& work) {
        return {.in = {work.shape.in_features, 1, 1}, .shape = work.shape};
    }
    static const Shape& in_of(const Conv2dSpec& spec) { return spec.shape.in; }
    static const Shape& in_of(const LinearSpec& spec) { return spec.in; }
    static int outputs_of(const Conv2dSpec& spec) { return spec.shape.out_channels; }
    static int outputs_of(const LinearSpec& spec) { return spec.shape.out_features; }
    template <typename Spec>
    void add_product(const std::string& layer, const Spec& spec, int images, bool input_gradient) {
        const auto run = operation(spec, in_of(spec), spec.out(), images);
        run->hold_parameters(spec.shape.weight_elems(), outputs_of(spec));
        const std::string n = std::to_string(images);
        const double flop = static_cast<double>(spec.shape.flop_per_image()) * images;
        add(layer + "/forward/" + n, flop, 0, [=] { run->forward(); });
        if (input_gradient) {
            add(layer + "/backward_data/" + n, flop, 0, [=] { run->backward_input(); });
        }
        // This includes the work that both gradients need first.
        add(layer + "/backward_weights/" + n, flop, 0, [=] {
            run->backward_begin();
            run->backward_params();
        });
    }
    DeviceBuffer<float> activation(const Shape& shape, int n) {
        return filled(backend_.activation_elems(shape, n));
    }
    // Repeats a few values: arithmetic time does not depend on them as long as they are normal.
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
    const double peak = chosen_cpu_kernels().measure_peak();
    benchmark::AddCustomContext("fma_peak_gflops_per_core", fmt::format("{:.1f}", peak));
    const auto backend = make_cpu_backend(1);
    Suite suite(*backend, peak);
    for (const Net& net : nets()) {
        std::vector<int> batches = options.batches;
        if (batches.empty()) {
            batches = net.name == "net" ? std::vector{64, 256} : std::vector{64};
        }
        for (const int n : batches) {
            for (std::size_t i = 0; i < net.layers.size(); ++i) {
                const Layer& layer = net.layers[i];
                suite.add_fused(net, i, n);
                if (n == batches[0] || !std::holds_alternative<ParameterWork>(layer.work)) {
                    std::visit(
                        [&](const auto& work) { suite(net.name + "/" + layer.name, work, n); },
                        layer.work);
                }
            }
        }
    }
    const bool any = benchmark::RunSpecifiedBenchmarks() > 0;
    benchmark::ClearRegisteredBenchmarks();  // as they hold the backend's memory
    return any ? 0 : 2;
}

}  // namespace gyre::bench
