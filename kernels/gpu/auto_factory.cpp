#include "kernels/gpu/auto_factory.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "kernels/cuda/timing.hpp"
#include "kernels/gpu/choices.hpp"

namespace gyre::SIMT_NAMESPACE {
namespace {

constexpr int kWarmUps = 2;
constexpr int kFewCalls = 2;  // to estimate how many a batch needs
#if defined(GYRE_EMULATED)    // emulated times are meaningless
constexpr int kBatches = 1, kMostCalls = 1;
#else
constexpr int kBatches = 5;
constexpr int kMostCalls = 1000;  // per batch
#endif
constexpr double kBatchUs = 2000.0;  // minimum duration of a batch

// The parts that are chosen separately.
enum Part : std::size_t { kForward, kBackwardInput, kBackwardParams, kParts };

struct Choice {
    int n;
    Op* op;
};
using ByImages = std::vector<Choice>;  // in ascending order
// The choice for n images, or for the next larger number.
ByImages::const_iterator place_of(const ByImages& choices, int n) {
    return std::find_if(choices.begin(), choices.end(),
                        [n](const Choice& choice) { return choice.n >= n; });
}

// Holds both implementations and calls the chosen one for each part.
class AutoOp final : public Op {
 public:
    AutoOp(std::unique_ptr<Op> ours, std::unique_ptr<Op> library)
        : ours_(std::move(ours)), library_(std::move(library)) {}
    Op& ours() { return *ours_; }
    Op& library() { return *library_; }
    // The first choice for a number of images is kept.
    void choose(Part part, int n, bool ours) {
        ByImages& choices = choices_[part];
        const auto at = place_of(choices, n);
        if (at == choices.end() || at->n != n) {
            choices.insert(at, {n, ours ? ours_.get() : library_.get()});
        }
    }
    bool has_choice(Part part, int n) const {
        const auto at = place_of(choices_[part], n);
        return at != choices_[part].end() && at->n == n;
    }

    OpNeeds needs() const override {
        const OpNeeds a = ours_->needs(), b = library_->needs();
        return {.saved_bytes = std::max(a.saved_bytes, b.saved_bytes),
                .in_place = a.in_place,
                .backward_reads_x = a.backward_reads_x || b.backward_reads_x,
                .backward_reads_y = a.backward_reads_y || b.backward_reads_y};
    }
    void forward(const Batch& batch, const OpIo& io) override {
        chosen(kForward, batch.n).forward(batch, io);
    }
    // Does nothing if the parts are chosen separately.
    void backward_begin(const Batch& batch, const OpIo& io) override {
        chosen(kBackwardInput, batch.n).backward_begin(batch, io);
    }
    void backward_params(const Batch& batch, const OpIo& io) override {
        chosen(kBackwardParams, batch.n).backward_params(batch, io);
    }
    void backward_input(const Batch& batch, const OpIo& io) override {
        chosen(kBackwardInput, batch.n).backward_input(batch, io);
    }
    bool can_update(const Batch& batch) const override {
        return chosen(kBackwardParams, batch.n).can_update(batch);
    }
    void backward_update(const Batch& batch, const OpIo& io, const UpdateArgs& update,
                         std::int64_t offset) override {
        chosen(kBackwardParams, batch.n).backward_update(batch, io, update, offset);
    }

 private:
    // A smaller last batch uses the choice for the full batch.
    Op& chosen(Part part, int n) const {
        const ByImages& choices = choices_[part];
        if (choices.empty()) {
            return *ours_;
        }
        const auto at = place_of(choices, n);
        return at == choices.end() ? *choices.back().op : *at->op;
    }

    const std::unique_ptr<Op> ours_, library_;
    std::array<ByImages, kParts> choices_;
};

// The facts about an operation that are needed to time it.
struct Facts {
    std::string name, shape;                   // for the table
    std::int64_t in_elems = 0, out_elems = 0;  // per image
    std::int64_t weights = 0, biases = 0;
    bool as_a_whole = false;  // its parts must use the same implementation
};

std::string text_of(const Shape& shape) {
    return fmt::format("{}x{}x{}", shape.channels, shape.height, shape.width);
}
// Returns nothing if there is no choice.
template <typename Spec>
std::optional<Facts> facts_of(const Spec&) {
    return std::nullopt;
}
std::optional<Facts> facts_of(const Conv2dSpec& spec) {
    const Conv2dShape& shape = spec.shape;
    if (spec.fused()) {
        return std::nullopt;
    }
    return Facts{
        .name = "conv2d",
        .shape = fmt::format("{} -> {}, kernel {}, stride {}, padding {}", text_of(shape.in),
                             text_of(shape.out()), shape.kernel, shape.stride, shape.padding),
        .in_elems = shape.in.elems(),
        .out_elems = shape.out().elems(),
        .weights = shape.weight_elems(),
        .biases = shape.out_channels};
}
std::optional<Facts> facts_of(const LinearSpec& spec) {
    const LinearShape& shape = spec.shape;
    if (spec.fused()) {
        return std::nullopt;
    }
    return Facts{.name = "linear",
                 .shape = fmt::format("{} -> {}", shape.in_features, shape.out_features),
                 .in_elems = shape.in_features,
                 .out_elems = shape.out_features,
                 .weights = shape.weight_elems(),
                 .biases = shape.out_features};
}
std::optional<Facts> facts_of(const MaxPool2dSpec& spec) {
    const MaxPool2dShape& shape = spec.shape;
    return Facts{
        .name = "maxpool2d",
        .shape = fmt::format("{} -> {}, kernel {}, stride {}{}", text_of(shape.in),
                             text_of(shape.out()), shape.kernel, shape.stride,
                             shape.padding > 0 ? fmt::format(", padding {}", shape.padding) : ""),
        .in_elems = shape.in.elems(),
        .out_elems = shape.out().elems(),
        .as_a_whole = true};
}

std::optional<Facts> facts_of(const BatchNorm2dSpec& spec) {
    return Facts{.name = "batchnorm2d",
                 .shape = text_of(spec.in),
                 .in_elems = spec.in.elems(),
                 .out_elems = spec.in.elems(),
                 .weights = spec.in.channels,
                 .biases = spec.in.channels,
                 .as_a_whole = true};
}

// One line of the table: the calls that are timed, and the parts that they decide.
struct Timed {
    std::string name;
    std::vector<Part> decides;
    std::function<void(Op&, const Batch&, const OpIo&)> call;
};
std::vector<Timed> timed_calls(const Facts& facts, bool training) {
    const Timed forward{facts.name + " forward", {kForward}, &Op::forward};
    if (!facts.as_a_whole) {
        std::vector<Timed> apart{forward};
        if (training) {
            apart.push_back({facts.name + " backward data", {kBackwardInput}, &Op::backward_input});
            apart.push_back(
                {facts.name + " backward weights", {kBackwardParams}, &Op::backward_params});
        }
        return apart;
    }
    const std::vector<Part> all{kForward, kBackwardInput, kBackwardParams};
    if (!training) {
        return {{forward.name, all, forward.call}};
    }
    const bool params = facts.weights > 0;
    return {{facts.name + " both ways", all, [params](Op& op, const Batch& batch, const OpIo& io) {
                 op.forward(batch, io);
                 op.backward_begin(batch, io);
                 if (params) {
                     op.backward_params(batch, io);
                 }
                 op.backward_input(batch, io);
             }}};
}

// The operands on which an operation is timed. If its parts are chosen separately, each part
// overwrites one operand with a result of the others, and all stay finite; if it is chosen as a
// whole, gradients and state have separate operands.
class Operands {
 public:
    Operands(const Context& context, const Facts& facts, int n, std::size_t saved_bytes)
        : as_a_whole_(facts.as_a_whole),
          x_(context.stream, n * facts.in_elems),
          y_(context.stream, n * facts.out_elems),
          w_(context.stream, facts.weights),
          b_(context.stream, facts.biases),
          dx_(context.stream, as_a_whole_ ? n * facts.in_elems : 0),
          dw_(context.stream, as_a_whole_ ? facts.weights : 0),
          db_(context.stream, as_a_whole_ ? facts.biases : 0),
          mean_(context.stream, as_a_whole_ ? facts.weights : 0),
          variance_(context.stream, as_a_whole_ ? facts.weights : 0),
          saved_(context.stream, static_cast<std::int64_t>(saved_bytes / sizeof(float)) + 1) {
        fill(context, as_a_whole_ ? facts.weights : 0, 1.0f, variance_.get());
    }
    OpIo io() const {
        return {.x = x_.get(),
                .y = y_.get(),
                .dy = y_.get(),
                .dx = (as_a_whole_ ? dx_ : x_).get(),
                .saved = saved_.get(),
                .params = {w_.get(), b_.get()},
                .grads = {(as_a_whole_ ? dw_ : w_).get(), (as_a_whole_ ? db_ : b_).get()},
                .state = {mean_.get(), variance_.get()}};
    }

 private:
    const bool as_a_whole_;
    const TimingOperand x_, y_, w_, b_, dx_, dw_, db_, mean_, variance_, saved_;
};

// Returns the medians of both. Their batches alternate, so that both see the same clock rates.
// Operands are in the cache if they fit, as is mostly the case in a step.
Timing compare(Stream& stream, const Calls::Body& ours, const Calls::Body& library) {
    Stopwatch watch(stream);
    // Run both before anything is captured: a first call may allocate, and the workspace may grow.
    for (int i = 0; i < kWarmUps; ++i) {
        ours(i);
        library(i);
    }
    const auto calls_for = [&](const Calls::Body& body) {
        Calls few(stream, body, kFewCalls);
        watch.microseconds(few);  // a graph's first launch takes longer
        const double once = std::max(watch.microseconds(few), 0.1);
        return static_cast<int>(std::clamp(std::ceil(kBatchUs / once), 1.0, double{kMostCalls}));
    };
    Calls of_ours(stream, ours, calls_for(ours));
    Calls of_library(stream, library, calls_for(library));
    std::array<double, kBatches> ours_us{}, library_us{};
    for (std::size_t i = 0; i < kBatches; ++i) {
        ours_us[i] = watch.microseconds(of_ours);
        library_us[i] = watch.microseconds(of_library);
    }
    const auto median = [](std::array<double, kBatches>& times) {
        std::sort(times.begin(), times.end());
        return std::max(times[kBatches / 2], 1e-3);  // the clock's resolution, so that no time is 0
    };
    return {median(ours_us), median(library_us)};
}

std::string environment(const Context& context, const GpuOptions& options, const std::string& gpu,
                        const KernelFactory& library) {
    return fmt::format("{}, gyre {}, {}, {}{}", gpu, GYRE_VERSION, library.description(),
                       context.tf32 ? "TF32" : "FP32",
                       options.deterministic ? ", deterministic" : "");
}

class AutoFactory final : public KernelFactory {
 public:
    AutoFactory(const Context& context, const GpuOptions& options, const std::string& gpu,
                std::unique_ptr<KernelFactory> own, std::unique_ptr<KernelFactory> library)
        : context_(context),
          own_(std::move(own)),
          library_(std::move(library)),
          choices_(environment(context, options, gpu, *library_), options.choices_file) {}

    std::string description() const override {
        return fmt::format("the faster of {} and {}", own_->description(), library_->description());
    }
    std::string choices() const override { return choices_.table(); }

    std::unique_ptr<Op> make(const std::string& name, const OpSpec& spec, const OpSizes& sizes,
                             DataType type) override {
        std::unique_ptr<Op> ours = own_->make(name, spec, sizes, type);
        if (type != DataType::float32) {
            return ours;  // the library's operations are float32 only
        }
        std::unique_ptr<Op> library = library_->make(name, spec, sizes);
        const std::optional<Facts> facts =
            std::visit([](const auto& each) { return facts_of(each); }, spec);
        if (!ours || !library || !facts) {
            return ours ? std::move(ours) : std::move(library);
        }
        auto op = std::make_unique<AutoOp>(std::move(ours), std::move(library));
        for_each_size(sizes, [&](int n, bool training) {
            choose(name, *facts, Batch{.n = n, .training = training}, *op);
        });
        return op;
    }

 private:
    void choose(const std::string& layer, const Facts& facts, const Batch& batch, AutoOp& op) {
        std::optional<Operands> operands;  // nothing where every timing is known already
        bool timed = false;
        for (const Timed& calls : timed_calls(facts, batch.training)) {
            // Sizes that both kinds of passes have are chosen for training, which comes first.
            if (op.has_choice(calls.decides.front(), batch.n)) {
                continue;
            }
            const Operation operation{calls.name, facts.shape, batch.n};
            if (choices_.find(operation) == nullptr) {
                if (!operands) {
                    operands.emplace(context_, facts, batch.n, op.needs().saved_bytes);
                }
                const OpIo io = operands->io();
                choices_.add(operation,
                             compare(
                                 context_.stream, [&](int) { calls.call(op.ours(), batch, io); },
                                 [&](int) { calls.call(op.library(), batch, io); }));
                timed = true;
            }
            choices_.list(layer, operation);
            for (const Part part : calls.decides) {
                op.choose(part, batch.n, choices_.find(operation)->ours_is_faster());
            }
        }
        if (timed) {
            choices_.save();
        }
    }

    const Context context_;
    const std::unique_ptr<KernelFactory> own_, library_;
    Choices choices_;
};

}  // namespace

std::unique_ptr<KernelFactory> make_auto_factory(const Context& context, const GpuOptions& options,
                                                 const std::string& gpu,
                                                 std::unique_ptr<KernelFactory> own,
                                                 std::unique_ptr<KernelFactory> library) {
    return std::make_unique<AutoFactory>(context, options, gpu, std::move(own), std::move(library));
}

}  // namespace gyre::SIMT_NAMESPACE
