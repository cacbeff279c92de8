// For each operation of a layer the faster of gyre's kernels and the libraries'.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "kernels/base/error.hpp"
#include "kernels/cuda/choices.hpp"
#include "kernels/cuda/layer_kernels.hpp"

namespace gyre::SIMT_NAMESPACE {
namespace {

constexpr int kWarmUps = 2;
constexpr int kFewCalls = 2;  // that say how many a batch should have
#if defined(GYRE_EMULATED)    // where times mean nothing
constexpr int kBatches = 1, kMostCalls = 1;
#else
constexpr int kBatches = 5;
constexpr int kMostCalls = 1000;  // in a batch
#endif
constexpr double kBatchUs = 2000.0;  // what a batch should take at least

using Call = std::function<void()>;

// Calls in a row, captured as the step is; one by one where a library cannot be captured.
class Batch {
 public:
    Batch(Stream& stream, const Call& call, int calls)
        : stream_(stream), call_(call), calls_(calls) {
        try {
            graph_.emplace(stream, [this] { run_plainly(); });
        } catch (const Error&) {
            graph_.reset();
        }
    }
    int calls() const { return calls_; }
    void run() {
        if (graph_) {
            graph_->launch(stream_);
        } else {
            run_plainly();
        }
    }

 private:
    void run_plainly() {
        for (int i = 0; i < calls_; ++i) {
            call_();
        }
    }

    Stream& stream_;
    const Call& call_;
    const int calls_;
    std::optional<Graph> graph_;
};

class Stopwatch {
 public:
    explicit Stopwatch(Stream& stream) : stream_(stream) {}

    // The medians of both. Their batches take turns, so that both see the same clocks.
    Timing compare(const Call& ours, const Call& library) {
        // Both before anything is captured: a first call may allocate, and the workspace may grow.
        for (int i = 0; i < kWarmUps; ++i) {
            ours();
            library();
        }
        Batch of_ours(stream_, ours, calls_for(ours));
        Batch of_library(stream_, library, calls_for(library));
        std::array<double, kBatches> ours_us{}, library_us{};
        for (std::size_t i = 0; i < kBatches; ++i) {
            ours_us[i] = time(of_ours);
            library_us[i] = time(of_library);
        }
        return {median(ours_us), median(library_us)};
    }

 private:
    // Microseconds of one of the calls. Operands are in the cache where they fit, as they mostly
    // are in a step.
    double time(Batch& batch) {
        stream_.record(start_);
        batch.run();
        stream_.record(end_);
        end_.synchronize();
        return 1000.0 * double{Event::milliseconds(start_, end_)} / batch.calls();
    }
    int calls_for(const Call& call) {
        Batch few(stream_, call, kFewCalls);
        time(few);  // the first launch of a graph takes longer
        const double once = std::max(time(few), 0.1);
        return static_cast<int>(std::clamp(std::ceil(kBatchUs / once), 1.0, double{kMostCalls}));
    }
    static double median(std::array<double, kBatches> times) {
        std::sort(times.begin(), times.end());
        return std::max(times[kBatches / 2], 1e-3);  // the clock's step; a time of 0 is no time
    }

    Stream& stream_;
    Event start_, end_;
};

// What is chosen together. A max-pool's two directions must fit each other: only ours have argmax.
enum class Kind {
    conv2d_forward,
    conv2d_backward_data,
    conv2d_backward_weights,
    maxpool2d,
    linear_forward,
    linear_backward_data,
    linear_backward_weights
};
// Empty: passes of this kind have no such operation.
const char* name_of(Kind kind, bool training) {
    switch (kind) {
        case Kind::conv2d_forward:
            return "conv2d forward";
        case Kind::conv2d_backward_data:
            return training ? "conv2d backward data" : "";
        case Kind::conv2d_backward_weights:
            return training ? "conv2d backward weights" : "";
        case Kind::maxpool2d:
            return training ? "maxpool2d both ways" : "maxpool2d forward";
        case Kind::linear_forward:
            return "linear forward";
        case Kind::linear_backward_data:
            return training ? "linear backward data" : "";
        case Kind::linear_backward_weights:
            return training ? "linear backward weights" : "";
    }
    return "";
}

std::string text_of(const Shape& shape) {
    return fmt::format("{}x{}x{}", shape.channels, shape.height, shape.width);
}
std::string text_of(const Conv2dShape& shape) {
    return fmt::format("{} -> {}, kernel {}, stride {}, padding {}", text_of(shape.in),
                       text_of(shape.out()), shape.kernel, shape.stride, shape.padding);
}
std::string text_of(const MaxPool2dShape& shape) {
    return fmt::format("{} -> {}, kernel {}, stride {}", text_of(shape.in), text_of(shape.out()),
                       shape.kernel, shape.stride);
}
std::string text_of(const LinearShape& shape) {
    return fmt::format("{} -> {}", shape.in_features, shape.out_features);
}

using Key = std::array<int, 8>;  // kind and shape
Key key_of(Kind kind, const Conv2dShape& shape) {
    return {static_cast<int>(kind), shape.in.channels, shape.in.height, shape.in.width,
            shape.out_channels,     shape.kernel,      shape.stride,    shape.padding};
}
Key key_of(Kind kind, const MaxPool2dShape& shape) {
    return {static_cast<int>(kind), shape.in.channels, shape.in.height,
            shape.in.width,         shape.kernel,      shape.stride};
}
Key key_of(Kind kind, const LinearShape& shape) {
    return {static_cast<int>(kind), shape.in_features, shape.out_features};
}

// What a weighted layer works on. Each direction overwrites one with a result of the others, and
// all stay finite.
struct Operands {
    TimingOperand x, w, b, y;
};

std::string environment(const Context& context, const GpuOptions& options, const std::string& gpu,
                        const LayerKernels& library) {
    return fmt::format("{}, gyre {}, {}, {}{}", gpu, GYRE_VERSION, library.implementation(),
                       context.tf32 ? "TF32" : "FP32",
                       options.deterministic ? ", deterministic" : "");
}

class AutomaticKernels final : public LayerKernels {
 public:
    AutomaticKernels(const Context& context, const GpuOptions& options, const std::string& gpu,
                     std::unique_ptr<LayerKernels> own, std::unique_ptr<LayerKernels> library)
        : context_(context),
          own_(std::move(own)),
          library_(std::move(library)),
          choices_(environment(context, options, gpu, *library_), options.choices_file) {}

    std::string implementation() const override {
        return fmt::format("the faster of {} and {}", own_->implementation(),
                           library_->implementation());
    }
    std::string choices() const override { return choices_.table(); }

    void prepare_conv2d(const std::string& layer, const Conv2dShape& shape, int n,
                        bool training) override {
        own_->prepare_conv2d(layer, shape, n, training);
        library_->prepare_conv2d(layer, shape, n, training);
        std::unique_ptr<Operands> operands;
        const auto at = [&]() -> const Operands& {
            return allocated(operands, n * shape.in.elems(), shape.weight_elems(),
                             shape.out_channels, n * shape.out().elems());
        };
        choose(layer, shape, n, training,
               {{Kind::conv2d_forward,
                 [&](LayerKernels& kernels) {
                     const auto& [x, w, b, y] = at();
                     kernels.conv2d_forward(shape, n, x.get(), w.get(), b.get(), y.get());
                 }},
                {Kind::conv2d_backward_data,
                 [&](LayerKernels& kernels) {
                     const auto& [x, w, b, y] = at();
                     kernels.conv2d_backward_data(shape, n, y.get(), w.get(), x.get());
                 }},
                {Kind::conv2d_backward_weights, [&](LayerKernels& kernels) {
                     const auto& [x, w, b, y] = at();
                     kernels.conv2d_backward_weights(shape, n, x.get(), y.get(), w.get(), b.get());
                 }}});
    }
    void prepare_maxpool2d(const std::string& layer, const MaxPool2dShape& shape, int n,
                           bool training) override {
        own_->prepare_maxpool2d(layer, shape, n, training);
        library_->prepare_maxpool2d(layer, shape, n, training);
        std::unique_ptr<Operands> operands;
        choose(layer, shape, n, training,
               {{Kind::maxpool2d, [&](LayerKernels& kernels) {
                     const std::int64_t in = n * shape.in.elems(), out = n * shape.out().elems();
                     const auto& [x, dx, bytes, y] = allocated(operands, in, in, out / 4 + 1, out);
                     auto* const argmax =
                         training ? reinterpret_cast<std::uint8_t*>(bytes.get()) : nullptr;
                     kernels.maxpool2d_forward(shape, n, x.get(), y.get(), argmax);
                     if (training) {
                         kernels.maxpool2d_backward(shape, n, x.get(), argmax, y.get(), dx.get());
                     }
                 }}});
    }
    void prepare_linear(const std::string& layer, const LinearShape& shape, int n,
                        bool training) override {
        own_->prepare_linear(layer, shape, n, training);
        library_->prepare_linear(layer, shape, n, training);
        std::unique_ptr<Operands> operands;
        const auto at = [&]() -> const Operands& {
            return allocated(operands, std::int64_t{n} * shape.in_features, shape.weight_elems(),
                             shape.out_features, std::int64_t{n} * shape.out_features);
        };
        choose(layer, shape, n, training,
               {{Kind::linear_forward,
                 [&](LayerKernels& kernels) {
                     const auto& [x, w, b, y] = at();
                     kernels.linear_forward(shape, n, x.get(), w.get(), b.get(), y.get());
                 }},
                {Kind::linear_backward_data,
                 [&](LayerKernels& kernels) {
                     const auto& [x, w, b, y] = at();
                     kernels.linear_backward_data(shape, n, y.get(), w.get(), x.get());
                 }},
                {Kind::linear_backward_weights, [&](LayerKernels& kernels) {
                     const auto& [x, w, b, y] = at();
                     kernels.linear_backward_weights(shape, n, x.get(), y.get(), w.get(), b.get());
                 }}});
    }

    void conv2d_forward(const Conv2dShape& shape, int n, const float* x, const float* w,
                        const float* b, float* y) override {
        chosen(Kind::conv2d_forward, shape, n).conv2d_forward(shape, n, x, w, b, y);
    }
    void conv2d_backward_data(const Conv2dShape& shape, int n, const float* dy, const float* w,
                              float* dx) override {
        chosen(Kind::conv2d_backward_data, shape, n).conv2d_backward_data(shape, n, dy, w, dx);
    }
    void conv2d_backward_weights(const Conv2dShape& shape, int n, const float* x, const float* dy,
                                 float* dw, float* db) override {
        chosen(Kind::conv2d_backward_weights, shape, n)
            .conv2d_backward_weights(shape, n, x, dy, dw, db);
    }
    void maxpool2d_forward(const MaxPool2dShape& shape, int n, const float* x, float* y,
                           std::uint8_t* argmax) override {
        chosen(Kind::maxpool2d, shape, n).maxpool2d_forward(shape, n, x, y, argmax);
    }
    void maxpool2d_backward(const MaxPool2dShape& shape, int n, const float* x,
                            const std::uint8_t* argmax, const float* dy, float* dx) override {
        chosen(Kind::maxpool2d, shape, n).maxpool2d_backward(shape, n, x, argmax, dy, dx);
    }
    void linear_forward(const LinearShape& shape, int n, const float* x, const float* w,
                        const float* b, float* y) override {
        chosen(Kind::linear_forward, shape, n).linear_forward(shape, n, x, w, b, y);
    }
    void linear_backward_data(const LinearShape& shape, int n, const float* dy, const float* w,
                              float* dx) override {
        chosen(Kind::linear_backward_data, shape, n).linear_backward_data(shape, n, dy, w, dx);
    }
    void linear_backward_weights(const LinearShape& shape, int n, const float* x, const float* dy,
                                 float* dw, float* db) override {
        chosen(Kind::linear_backward_weights, shape, n)
            .linear_backward_weights(shape, n, x, dy, dw, db);
    }
    void cross_entropy(const CrossEntropyArgs& args, int n) override {
        own_->cross_entropy(args, n);
    }

 private:
    struct Candidate {
        Kind kind;
        std::function<void(LayerKernels&)> run;
    };

    // Made when first used: nothing is where every timing is known already.
    const Operands& allocated(std::unique_ptr<Operands>& operands, std::int64_t x, std::int64_t w,
                              std::int64_t b, std::int64_t y) const {
        if (!operands) {
            Stream& stream = context_.stream;
            operands.reset(new Operands{{stream, x}, {stream, w}, {stream, b}, {stream, y}});
        }
        return *operands;
    }

    template <typename LayerShape>
    void choose(const std::string& layer, const LayerShape& shape, int n, bool training,
                const std::vector<Candidate>& candidates) {
        if (n < 1) {
            return;
        }
        bool timed = false;
        for (const Candidate& candidate : candidates) {
            const std::string name = name_of(candidate.kind, training);
            std::map<int, LayerKernels*>& by_size = chosen_[key_of(candidate.kind, shape)];
            // Sizes that both kinds of passes have are chosen for training, which comes first.
            if (name.empty() || by_size.count(n) != 0) {
                continue;
            }
            const Operation operation{name, text_of(shape), n};
            if (choices_.find(operation) == nullptr) {
                choices_.add(operation, Stopwatch(context_.stream)
                                            .compare([&] { candidate.run(*own_); },
                                                     [&] { candidate.run(*library_); }));
                timed = true;
            }
            choices_.list(layer, operation);
            by_size[n] = choices_.find(operation)->ours_is_faster() ? own_.get() : library_.get();
        }
        if (timed) {
            choices_.save();
        }
    }

    // The choice for the next larger number of images that was announced, or else the largest: a
    // last, smaller batch is done like the others.
    template <typename LayerShape>
    LayerKernels& chosen(Kind kind, const LayerShape& shape, int n) const {
        const auto found = chosen_.find(key_of(kind, shape));
        if (found == chosen_.end()) {
            return *own_;
        }
        const auto at = found->second.lower_bound(n);
        return at == found->second.end() ? *found->second.rbegin()->second : *at->second;
    }

    const Context context_;
    const std::unique_ptr<LayerKernels> own_, library_;
    Choices choices_;
    std::map<Key, std::map<int, LayerKernels*>> chosen_;  // by number of images
};

float* random_values(Stream& stream, std::int64_t elems) {
    std::vector<float> values(static_cast<std::size_t>(std::min<std::int64_t>(elems, 1 << 16)));
    std::minstd_rand generator(1);
    std::uniform_real_distribution<float> distribution(-1.0f, 1.0f);
    std::generate(values.begin(), values.end(), [&] { return distribution(generator); });

    const std::size_t bytes = static_cast<std::size_t>(elems) * sizeof(float);
    char* memory = static_cast<char*>(allocate(std::max(bytes, sizeof(float))));
    try {
        std::size_t filled = values.size() * sizeof(float);
        stream.upload(memory, values.data(), filled);
        while (filled < bytes) {
            const std::size_t part = std::min(filled, bytes - filled);
            stream.copy(memory + filled, memory, part);
            filled += part;
        }
        stream.synchronize();
    } catch (...) {
        release(memory);
        throw;
    }
    return reinterpret_cast<float*>(memory);
}

}  // namespace

TimingOperand::TimingOperand(Stream& stream, std::int64_t elems)
    : memory_(random_values(stream, elems)) {}

std::unique_ptr<LayerKernels> make_automatic_kernels(const Context& context,
                                                     const GpuOptions& options,
                                                     const std::string& gpu,
                                                     std::unique_ptr<LayerKernels> own,
                                                     std::unique_ptr<LayerKernels> library) {
    return std::make_unique<AutomaticKernels>(context, options, gpu, std::move(own),
                                              std::move(library));
}

}  // namespace gyre::SIMT_NAMESPACE
