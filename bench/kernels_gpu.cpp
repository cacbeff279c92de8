// Every GPU kernel, gyre's own and the libraries' (cuDNN, cuBLASLt), at the shapes of `net` and
// `wide`: time, and the share of the ceilings measured in the same run.
//
// Ceilings: a large copy from device to device (bytes read and written), fused multiply-adds in
// registers, and large matrix products through cuBLASLt in fp32 and TF32. A kernel's floor is the
// larger of its fewest bytes over the copy's bandwidth and of the formula's FLOPs over the faster
// of FMA and fp32 product (with --tf32: the TF32 product); "%" is floor over time.
//
// Times are medians over kSamples batches of calls between two events. A batch is a CUDA graph by
// default, so that kernels follow one another as fast as the GPU can start them, whatever the
// host's speed; --launch=stream times plain calls. Calls rotate over copies of their operands that
// together exceed the L2 cache, as far as kMostSets copies do. Before it is timed, every operation
// is verified: ours and the library's against the CPU backend, at as many images as that does
// quickly, then ours against the library's at the batch that is timed. Inputs are random and
// differ in every check; outputs are filled with NaN before.
//
// Compiled twice, like kernels/cuda/: on the emulator times mean nothing, and gyre's own kernels
// stand in for the library's.
#include <benchmark/benchmark.h>
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <random>
#include <thread>

#include "bench/ceilings.hpp"
#include "bench/kernels.hpp"
#include "bench/report.hpp"
#include "kernels/cuda/layer_kernels.hpp"
#include "kernels/error.hpp"

#if !defined(GYRE_EMULATED)
#include "kernels/cuda/check.hpp"
#include "kernels/cuda/library_kernels.hpp"
#include "kernels/cuda/native.hpp"
#endif

namespace gyre::SIMT_NAMESPACE {
namespace {

namespace own = gyre::SIMT_NAMESPACE;
using bench::Row;
using Body = std::function<void(int call)>;

constexpr std::size_t kMiB = std::size_t{1} << 20;
#if defined(GYRE_EMULATED)
constexpr bool kEmulated = true;
constexpr std::size_t kRotate = 1;  // bytes that the copies of operands exceed
constexpr std::size_t kCopyBytes = kMiB;
constexpr int kGemm = 64, kFmaRounds = 10;
constexpr int kMostCalls = 2, kWarmUps = 1, kSamples = 2;
constexpr int kDatasetImages = 256;
constexpr std::int64_t kPool = 65'521;
constexpr double kReferenceFlop = 1e8;
constexpr std::chrono::milliseconds kClockWarmUp{0};
#else
constexpr bool kEmulated = false;
constexpr std::size_t kRotate = 160 * kMiB;  // more than twice the L2 cache of an H100 or H200
constexpr std::size_t kCopyBytes = 1024 * kMiB;
constexpr int kGemm = 8192, kFmaRounds = 20'000;
constexpr int kMostCalls = 1000, kWarmUps = 3, kSamples = 9;
constexpr int kDatasetImages = 60'000;
constexpr std::int64_t kPool = 4'194'301;
constexpr double kReferenceFlop = 4e9;  // of the CPU's part of a verification
constexpr std::chrono::milliseconds kClockWarmUp{500};
#endif
constexpr int kMostSets = kMostCalls;
constexpr double kBatchUs = 1000.0;                 // what a batch of calls should take
constexpr std::size_t kReferenceBytes = 16 * kMiB;  // of a verification's operands
constexpr std::size_t kComparedElems = kMiB;        // of an output's begin, and of its end
constexpr std::size_t kOperandAlignment = 256;
// ||found - expected|| / ||expected||. Products in TF32 are off by about 3e-4.
constexpr double kTolerance = 2e-4, kToleranceTf32 = 3e-3;

std::size_t free_memory() {
#if defined(GYRE_EMULATED)
    return 2048 * kMiB;
#else
    std::size_t free = 0, total = 0;
    GYRE_CUDA_CHECK(cudaMemGetInfo(&free, &total));
    return free;
#endif
}

// ---- time ---------------------------------------------------------------------------------------

class Stopwatch {
 public:
    explicit Stopwatch(Stream& stream) : stream_(stream) {}

    // Microseconds that `work` takes in the stream.
    double time(const std::function<void()>& work) {
        const auto begin = std::chrono::steady_clock::now();
        stream_.record(start_);
        work();
        stream_.record(end_);
        end_.synchronize();
        if (kEmulated) {
            return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count() *
                   1e6;
        }
        return 1e3 * static_cast<double>(Event::milliseconds(start_, end_));
    }

 private:
    Stream& stream_;
    Event start_, end_;
};

double median(std::vector<double> values) {
    std::sort(values.begin(), values.end());
    return values[values.size() / 2];
}

// body(0), ..., body(calls - 1) in a row, as a CUDA graph where that is wanted and possible.
class Calls {
 public:
    Calls(Stream& stream, Body body, int calls, bool graph)
        : stream_(stream), body_(std::move(body)), calls_(calls) {
        if (graph && !kEmulated) {
            capture();
        }
    }
    Calls(const Calls&) = delete;
    Calls& operator=(const Calls&) = delete;

#if defined(GYRE_EMULATED)
    bool is_graph() const {
        return false;
    }
    void run() {
        run_plain();
    }
#else
    ~Calls() {
        drop();
    }
    bool is_graph() const {
        return instance_ != nullptr;
    }
    void run() {
        if (is_graph()) {
            GYRE_CUDA_CHECK(cudaGraphLaunch(instance_, native(stream_)));
        } else {
            run_plain();
        }
    }
#endif

 private:
    void run_plain() {
        for (int call = 0; call < calls_; ++call) {
            body_(call);
        }
    }
#if defined(GYRE_EMULATED)
    void capture() {}
#else
    void drop() noexcept {
        if (instance_ != nullptr) {
            cudaGraphExecDestroy(instance_);
            instance_ = nullptr;
        }
        if (graph_ != nullptr) {
            cudaGraphDestroy(graph_);
            graph_ = nullptr;
        }
    }
    // What cannot be captured (an allocation, say) is timed as plain calls.
    void capture() {
        GYRE_CUDA_CHECK(cudaStreamBeginCapture(native(stream_), cudaStreamCaptureModeRelaxed));
        std::string why;
        try {
            run_plain();
        } catch (const Error& error) {
            why = error.what();
        }
        const cudaError_t captured = cudaStreamEndCapture(native(stream_), &graph_);
        if (why.empty() && captured == cudaSuccess &&
            cudaGraphInstantiateWithFlags(&instance_, graph_, 0) == cudaSuccess) {
            return;
        }
        instance_ = nullptr;
        drop();
        cudaGetLastError();  // it is not the next call's
    }
    cudaGraph_t graph_ = nullptr;
    cudaGraphExec_t instance_ = nullptr;
#endif

    Stream& stream_;
    Body body_;
    int calls_;
};

// ---- operands -----------------------------------------------------------------------------------

enum class Type { f32, i32, u8 };
enum class Role { in, out, in_out, scratch };
enum class Values { any, positive, labels, samples };

struct Operand {
    Role role = Role::in;
    Type type = Type::f32;
    Values values = Values::any;
    Shape shape;
    bool batched =
        false;  // an activation [n][shape] (i32: [n]), or else [shape] whatever the batch
    bool ours_alone = false;  // an output that the library's operation lacks

    std::int64_t elems(int n) const { return shape.elems() * (batched ? n : 1); }
    std::size_t bytes(int n) const {
        return static_cast<std::size_t>(elems(n)) * (type == Type::u8 ? 1 : 4);
    }
    bool is_output() const { return role == Role::out || role == Role::in_out; }
    bool is_input() const { return role == Role::in || role == Role::in_out; }
};
Operand images(Role role, const Shape& shape) {
    return {role, Type::f32, Values::any, shape, true};
}
Operand vector(Role role, std::int64_t elems, Values values = Values::any) {
    return {role, Type::f32, values, {1, 1, static_cast<int>(elems)}};
}
Operand indices(Values values) {
    return {Role::in, Type::i32, values, {1, 1, 1}, true};
}

struct Args {
    int n = 0;
    bool timed = false;  // values must then stay normal numbers, call after call
    std::vector<void*> at;

    float* f(std::size_t i) const { return static_cast<float*>(at[i]); }
    std::int32_t* i32(std::size_t i) const { return static_cast<std::int32_t*>(at[i]); }
    std::uint8_t* u8(std::size_t i) const { return static_cast<std::uint8_t*>(at[i]); }
};

// Random values on the device, from which operands are copied: others every time, as the number of
// values is prime and an operand starts where the last one ended. No two are equal, so that the
// largest of a max-pool's window is the same one for everybody.
class ValuePool {
 public:
    explicit ValuePool(Stream& stream) : stream_(stream) {
        std::vector<float> values(static_cast<std::size_t>(kPool));
        for (std::size_t i = 0; i < values.size(); ++i) {
            values[i] = (2.0f * static_cast<float>(i) + 1.0f) / static_cast<float>(kPool) - 1.0f;
        }
        std::shuffle(values.begin(), values.end(), random_);
        any_ = upload(values);
        std::transform(values.begin(), values.end(), values.begin(),
                       [](float v) { return std::abs(v) + 0.01f; });
        positive_ = upload(values);
        std::fill(values.begin(), values.end(), std::numeric_limits<float>::quiet_NaN());
        poison_ = upload(values);
    }
    ~ValuePool() {
        release(any_);
        release(positive_);
        release(poison_);
    }
    ValuePool(const ValuePool&) = delete;
    ValuePool& operator=(const ValuePool&) = delete;

    void fill(const Operand& operand, int n, void* to) {
        if (operand.type == Type::i32) {
            const int end = operand.values == Values::labels ? 10 : kDatasetImages;
            std::uniform_int_distribution<std::int32_t> distribution(0, end - 1);
            std::vector<std::int32_t> values(static_cast<std::size_t>(operand.elems(n)));
            std::generate(values.begin(), values.end(), [&] { return distribution(random_); });
            stream_.upload(to, values.data(), operand.bytes(n));
            stream_.synchronize();
        } else {
            copy(operand.values == Values::positive ? positive_ : any_, operand.bytes(n), to);
        }
    }
    void poison(const Operand& operand, int n, void* to) { copy(poison_, operand.bytes(n), to); }

 private:
    float* upload(const std::vector<float>& values) {
        auto* memory = static_cast<float*>(allocate(values.size() * sizeof(float)));
        stream_.upload(memory, values.data(), values.size() * sizeof(float));
        stream_.synchronize();
        return memory;
    }
    void copy(const float* pool, std::size_t bytes, void* to) {
        const std::size_t size = static_cast<std::size_t>(kPool) * sizeof(float);
        for (std::size_t done = 0; done < bytes;) {
            const std::size_t part = std::min(bytes - done, size - cursor_);
            stream_.copy(static_cast<char*>(to) + done,
                         reinterpret_cast<const char*>(pool) + cursor_, part);
            done += part;
            cursor_ = (cursor_ + (part + 3) / 4 * 4) % size;
        }
    }

    Stream& stream_;
    std::mt19937 random_{2026};
    float *any_ = nullptr, *positive_ = nullptr, *poison_ = nullptr;
    std::size_t cursor_ = 0;  // bytes
};

// Several copies of an operation's operands in one allocation, filled.
class OperandSets {
 public:
    OperandSets(ValuePool& pool, const std::vector<Operand>& operands, int n, std::size_t sets)
        : memory_(static_cast<char*>(allocate(set_bytes(operands, n) * sets))) {
        char* at = memory_;
        for (std::size_t set = 0; set < sets; ++set) {
            Args args;
            args.n = n;
            for (const Operand& operand : operands) {
                args.at.push_back(at);
                pool.fill(operand, n, at);
                at += padded(operand.bytes(n));
            }
            sets_.push_back(std::move(args));
        }
    }
    ~OperandSets() { release(memory_); }
    OperandSets(const OperandSets&) = delete;
    OperandSets& operator=(const OperandSets&) = delete;

    std::vector<Args>& sets() { return sets_; }

    static std::size_t set_bytes(const std::vector<Operand>& operands, int n) {
        std::size_t sum = 0;
        for (const Operand& operand : operands) {
            sum += padded(operand.bytes(n));
        }
        return sum;
    }

 private:
    static std::size_t padded(std::size_t bytes) {
        return (bytes + kOperandAlignment - 1) / kOperandAlignment * kOperandAlignment;
    }

    char* const memory_;
    std::vector<Args> sets_;
};

// ---- operations ---------------------------------------------------------------------------------

// The same names for what runs on the GPU and for the reference on the CPU.
struct Gpu {
    const Context& context;
    LayerKernels& layers;

    void gather(const GatherArgs& args, int n, float* x, std::int32_t* y) const {
        own::gather(context, args, n, x, y);
    }
    void relu_forward(const Shape& shape, int n, float* y) const {
        own::relu_forward(context, shape.elems() * n, y);
    }
    void relu_backward(const Shape& shape, int n, const float* y, float* dy) const {
        own::relu_backward(context, shape.elems() * n, y, dy);
    }
    void dropout(const DropoutArgs& args, int n, float* x) const {
        own::dropout(context, args, n, x);
    }
    void sgd_step(const SgdArgs& args, std::int64_t elems, float* p, const float* g,
                  float* v) const {
        own::sgd_step(context, args, elems, p, g, v);
    }
    void adam_step(const AdamArgs& args, std::int64_t elems, float* p, const float* g, float* m,
                   float* v) const {
        own::adam_step(context, args, elems, p, g, m, v);
    }
    void fill(std::int64_t elems, float value, float* x) const {
        own::fill(context, elems, value, x);
    }
    void clip_norm(std::int64_t elems, float most, float* x) const {
        own::clip_norm(context, elems, most, x);
    }
    // d_log_probabilities of a loss: -scale at the label, 0 elsewhere.
    void one_hot(int n, int classes, float scale, const std::int32_t* labels, float* to) const {
        std::vector<std::int32_t> host(static_cast<std::size_t>(n));
        context.stream.download(host.data(), labels, host.size() * sizeof(std::int32_t));
        context.stream.synchronize();
        std::vector<float> values(host.size() * static_cast<std::size_t>(classes));
        for (std::size_t i = 0; i < host.size(); ++i) {
            values[i * static_cast<std::size_t>(classes) + static_cast<std::size_t>(host[i])] =
                -scale;
        }
        context.stream.upload(to, values.data(), values.size() * sizeof(float));
        context.stream.synchronize();
    }
};
struct Cpu {
    Backend& layers;

    void gather(const GatherArgs& args, int n, float* x, std::int32_t* y) const {
        layers.gather(args, n, x, y);
    }
    void relu_forward(const Shape& shape, int n, float* y) const {
        layers.relu_forward(shape, n, y);
    }
    void relu_backward(const Shape& shape, int n, const float* y, float* dy) const {
        layers.relu_backward(shape, n, y, dy);
    }
    void dropout(const DropoutArgs& args, int n, float* x) const { layers.dropout(args, n, x); }
    void sgd_step(const SgdArgs& args, std::int64_t elems, float* p, const float* g,
                  float* v) const {
        layers.sgd_step(args, elems, p, g, v);
    }
    void adam_step(const AdamArgs& args, std::int64_t elems, float* p, const float* g, float* m,
                   float* v) const {
        layers.adam_step(args, elems, p, g, m, v);
    }
    void fill(std::int64_t elems, float value, float* x) const { std::fill_n(x, elems, value); }
    void clip_norm(std::int64_t elems, float most, float* x) const {
        layers.clip_norm(elems, most, x);
    }
    void one_hot(int, int, float, const std::int32_t*, float*) const {}
};

struct Operation {
    std::string net, layer, direction;
    std::vector<Operand> operands;
    double image_flop = 0, image_bytes = 0, fixed_bytes = 0;
    std::function<void(LayerKernels&, int n)> prepare;  // may be empty
    std::function<void(const Gpu&, const Args&)> set_up, ours,
        library;  // set_up, library: likewise
    std::function<void(const Cpu&, const Args&)> cpu_set_up, reference;
    bool is_product = false;  // may round to TF32
};

template <typename Function>
void set_up_with(Operation& operation, Function function) {
    operation.set_up = function;
    operation.cpu_set_up = function;
}
// What gyre alone has, and what the library has, too.
template <typename Function>
void do_with(Operation& operation, Function function) {
    operation.ours = function;
    operation.reference = function;
}
template <typename Function>
void compare_with(Operation& operation, Function function) {
    do_with(operation, function);
    operation.library = function;
}

// Makes the operations of a layer.
class Operations {
 public:
    Operations(std::string net, std::string layer)
        : net_(std::move(net)), layer_(std::move(layer)) {}
    std::vector<Operation> take() { return std::move(all_); }

    void operator()(const bench::GatherWork& work) {
        const Shape shape = work.shape;
        Operation& op = add("gather", 5.0 * elems(shape) + 12.0, 0);
        op.operands = {{Role::in,
                        Type::u8,
                        Values::any,
                        {kDatasetImages * shape.channels, shape.height, shape.width}},
                       {Role::in, Type::i32, Values::labels, {1, 1, kDatasetImages}},
                       indices(Values::samples),
                       vector(Role::in, shape.channels),
                       vector(Role::in, shape.channels),
                       images(Role::out, shape),
                       {Role::out, Type::i32, Values::any, {1, 1, 1}, true}};
        do_with(op, [shape](const auto& k, const Args& a) {
            k.gather({a.u8(0), a.i32(1), a.i32(2), shape, a.f(3), a.f(4)}, a.n, a.f(5), a.i32(6));
        });
    }

    void operator()(const bench::ConvWork& work) {
        const Conv2dShape s = work.shape;
        weighted(
            images(Role::in, s.in), images(Role::in, s.out()), s.weight_elems(), s.out_channels,
            static_cast<double>(s.flop_per_image()), work.input_gradient,
            [s, layer = layer_](LayerKernels& k, int n) { k.prepare_conv2d(layer, s, n); },
            [s](const auto& k, const Args& a) {
                k.layers.conv2d_forward(s, a.n, a.f(0), a.f(1), a.f(2), a.f(3));
            },
            [s](const auto& k, const Args& a) {
                k.layers.conv2d_backward_data(s, a.n, a.f(0), a.f(1), a.f(2));
            },
            [s](const auto& k, const Args& a) {
                k.layers.conv2d_backward_weights(s, a.n, a.f(0), a.f(1), a.f(2), a.f(3));
            });
    }

    void operator()(const bench::LinearWork& work) {
        const LinearShape s = work.shape;
        weighted(
            images(Role::in, {s.in_features, 1, 1}), images(Role::in, {s.out_features, 1, 1}),
            s.weight_elems(), s.out_features, static_cast<double>(s.flop_per_image()), true,
            [s, layer = layer_](LayerKernels& k, int n) { k.prepare_linear(layer, s, n); },
            [s](const auto& k, const Args& a) {
                k.layers.linear_forward(s, a.n, a.f(0), a.f(1), a.f(2), a.f(3));
            },
            [s](const auto& k, const Args& a) {
                k.layers.linear_backward_data(s, a.n, a.f(0), a.f(1), a.f(2));
            },
            [s](const auto& k, const Args& a) {
                k.layers.linear_backward_weights(s, a.n, a.f(0), a.f(1), a.f(2), a.f(3));
            });
    }

    // The library has no argmax: its backward pass looks for the largest values again.
    void operator()(const bench::PoolWork& work) {
        const MaxPool2dShape s = work.shape;
        const Operand argmax{Role::scratch, Type::u8, Values::any, s.out(), true};
        const double bytes = 4.0 * elems(s.in) + 5.0 * elems(s.out());
        const auto prepare = [s, layer = layer_](LayerKernels& k, int n) {
            k.prepare_maxpool2d(layer, s, n);
        };
        Operation& forward = add("forward", bytes, 0);
        forward.operands = {images(Role::in, s.in), images(Role::out, s.out()), argmax};
        forward.prepare = prepare;
        compare_with(forward, [s](const auto& k, const Args& a) {
            k.layers.maxpool2d_forward(s, a.n, a.f(0), a.f(1), a.u8(2));
        });
        Operation& backward = add("backward", bytes, 0);
        backward.operands = {images(Role::in, s.in), images(Role::scratch, s.out()), argmax,
                             images(Role::in, s.out()), images(Role::out, s.in)};
        backward.prepare = prepare;
        set_up_with(backward, [s](const auto& k, const Args& a) {
            k.layers.maxpool2d_forward(s, a.n, a.f(0), a.f(1), a.u8(2));
        });
        compare_with(backward, [s](const auto& k, const Args& a) {
            k.layers.maxpool2d_backward(s, a.n, a.f(0), a.u8(2), a.f(3), a.f(4));
        });
    }

    void operator()(const bench::ReluWork& work) {
        const Shape shape = work.shape;
        Operation& forward = add("forward", 8.0 * elems(shape), 0);
        forward.operands = {images(Role::in_out, shape)};
        do_with(forward,
                [shape](const auto& k, const Args& a) { k.relu_forward(shape, a.n, a.f(0)); });
        Operation& backward = add("backward", 12.0 * elems(shape), 0);
        backward.operands = {images(Role::in, shape), images(Role::in_out, shape)};
        do_with(backward, [shape](const auto& k, const Args& a) {
            k.relu_backward(shape, a.n, a.f(0), a.f(1));
        });
    }

    void operator()(const bench::DropoutWork& work) {
        Operation& op = add("both", 8.0 * elems(work.shape) + 4.0, 0);
        op.operands = {images(Role::in_out, work.shape), indices(Values::samples)};
        do_with(op, [work](const auto& k, const Args& a) {
            DropoutArgs args;
            args.stream = {1, RandomPurpose::dropout, 0, 0};
            args.samples = a.i32(1);
            args.shape = work.shape;
            args.by_channel = work.by_channel;
            args.probability = a.timed ? 1e-6f : 0.5f;
            k.dropout(args, a.n, a.f(0));
        });
    }

    // The library's log-softmax and its gradient are handed the loss's gradient, ready, and sum no
    // loss.
    void operator()(const bench::LossWork& work) {
        const int classes = work.classes;
        const Shape shape{classes, 1, 1};
        constexpr float kScale = 0.01f;
        Operation& op = add("both", 8.0 * classes + 4.0, 0);
        Operand sums = vector(Role::out, 2);
        sums.ours_alone = true;
        op.operands = {images(Role::in, shape),      indices(Values::labels),
                       images(Role::out, shape),     sums,
                       images(Role::scratch, shape), images(Role::scratch, shape)};
        set_up_with(op, [=](const auto& k, const Args& a) {
            k.one_hot(a.n, classes, kScale, a.i32(1), a.f(5));
        });
        do_with(op, [=](const auto& k, const Args& a) {
            k.layers.cross_entropy({classes, a.f(0), a.i32(1), kScale, a.f(2), a.f(3)}, a.n);
        });
#if defined(GYRE_EMULATED)
        op.library = op.ours;
#else
        op.library = [=, softmax = std::shared_ptr<LogSoftmax>()](const Gpu& k,
                                                                  const Args& a) mutable {
            if (!softmax) {
                softmax = std::make_shared<LogSoftmax>(k.context);
            }
            softmax->forward_backward(a.n, classes, a.f(0), a.f(4), a.f(5), a.f(2));
        };
#endif
    }

    void operator()(const bench::ParameterWork& work) {
        const std::int64_t elems = work.elems;
        const auto bytes = static_cast<double>(elems);
        Operation& sgd = add("sgd", 0, 20.0 * bytes);
        sgd.operands = {vector(Role::in_out, elems), vector(Role::in, elems),
                        vector(Role::in_out, elems)};
        do_with(sgd, [=](const auto& k, const Args& a) {
            k.sgd_step({0.01f, 0.5f, 0.0f, false}, elems, a.f(0), a.f(1), a.f(2));
        });
        Operation& adam = add("adam", 0, 28.0 * bytes);
        adam.operands = {vector(Role::in_out, elems), vector(Role::in, elems),
                         vector(Role::in_out, elems),
                         vector(Role::in_out, elems, Values::positive)};
        do_with(adam, [=](const auto& k, const Args& a) {
            k.adam_step({}, elems, a.f(0), a.f(1), a.f(2), a.f(3));
        });
        Operation& fill = add("fill", 0, 4.0 * bytes);
        fill.operands = {vector(Role::out, elems)};
        do_with(fill, [=](const auto& k, const Args& a) { k.fill(elems, 0.5f, a.f(0)); });
        // Read for the norm, then read and written.
        Operation& clip = add("clip_norm", 0, 12.0 * bytes);
        clip.operands = {vector(Role::in_out, elems)};
        do_with(clip, [=](const auto& k, const Args& a) {
            k.clip_norm(elems, a.timed ? 1e30f : 1.0f, a.f(0));
        });
    }

 private:
    static double elems(const Shape& shape) {
        return static_cast<double>(shape.elems());
    }

    // The reference is valid until the next call.
    Operation& add(const char* direction, double image_bytes, double fixed_bytes) {
        Operation& op = all_.emplace_back();
        op.net = net_;
        op.layer = layer_;
        op.direction = direction;
        op.image_bytes = image_bytes;
        op.fixed_bytes = fixed_bytes;
        return op;
    }

    // The three directions of a layer with weights.
    template <typename Prepare, typename Forward, typename Data, typename Weights>
    void weighted(const Operand& x, const Operand& y, std::int64_t weights, std::int64_t bias,
                  double flop, bool input_gradient, Prepare prepare, Forward forward, Data data,
                  Weights gradient) {
        const double image_bytes = 4.0 * (elems(x.shape) + elems(y.shape));
        const double w_bytes = 4.0 * static_cast<double>(weights);
        const double b_bytes = 4.0 * static_cast<double>(bias);
        const auto as_output = [](Operand operand) {
            operand.role = Role::out;
            return operand;
        };
        const auto product = [&](const char* direction, double fixed_bytes, auto body,
                                 std::vector<Operand> operands) {
            Operation& op = add(direction, image_bytes, fixed_bytes);
            op.operands = std::move(operands);
            op.image_flop = flop;
            op.is_product = true;
            op.prepare = prepare;
            compare_with(op, body);
        };
        product("forward", w_bytes + b_bytes, forward,
                {x, vector(Role::in, weights), vector(Role::in, bias), as_output(y)});
        if (input_gradient) {
            product("backward_data", w_bytes, data, {y, vector(Role::in, weights), as_output(x)});
        }
        product("backward_weights", w_bytes + b_bytes, gradient,
                {x, y, vector(Role::out, weights), vector(Role::out, bias)});
    }

    const std::string net_, layer_;
    std::vector<Operation> all_;
};

// ---- verification -------------------------------------------------------------------------------

using Host = std::vector<std::byte>;
using Numbers = std::vector<double>;

template <typename T>
void append(const Host& from, Numbers& to) {
    for (std::size_t i = 0; i + sizeof(T) <= from.size(); i += sizeof(T)) {
        T value;
        std::memcpy(&value, from.data() + i, sizeof(T));
        to.push_back(static_cast<double>(value));
    }
}
Numbers numbers(Type type, const Host& from) {
    Numbers values;
    switch (type) {
        case Type::f32:
            append<float>(from, values);
            break;
        case Type::i32:
            append<std::int32_t>(from, values);
            break;
        case Type::u8:
            append<std::uint8_t>(from, values);
            break;
    }
    return values;
}

// Infinite where anything is not a number, found ones or expected ones.
double relative_error(const Numbers& found, const Numbers& expected) {
    double difference = 0.0, norm = 0.0;
    for (std::size_t i = 0; i < expected.size(); ++i) {
        difference += (found[i] - expected[i]) * (found[i] - expected[i]);
        norm += expected[i] * expected[i];
    }
    const double error = std::sqrt(difference / std::max(norm, 1e-30));
    return std::isfinite(error) ? error : std::numeric_limits<double>::infinity();
}

// The operands of one call on the CPU backend, whose activations may lie otherwise in memory.
class CpuOperands {
 public:
    CpuOperands(Backend& cpu, const std::vector<Operand>& operands, int n,
                const std::vector<Host>& values)
        : cpu_(cpu), operands_(operands) {
        args_.n = n;
        for (std::size_t i = 0; i < operands.size(); ++i) {
            const Operand& operand = operands[i];
            const std::size_t elems =
                is_activation(operand)
                    ? static_cast<std::size_t>(cpu.activation_elems(operand.shape, n))
                    : static_cast<std::size_t>(operand.elems(n));
            const auto bytes = static_cast<std::int64_t>(
                operand.bytes(n) / static_cast<std::size_t>(operand.elems(n)) * elems);
            buffers_.emplace_back(cpu, bytes);
            void* const memory = buffers_.back().get();
            args_.at.push_back(memory);
            if (operand.is_input() && is_activation(operand)) {
                cpu.import_activation(operand.shape, n,
                                      reinterpret_cast<const float*>(values[i].data()), args_.f(i));
            } else if (operand.is_input()) {
                std::memcpy(memory, values[i].data(), values[i].size());
            }
        }
    }
    const Args& args() const { return args_; }
    Numbers read(std::size_t i) {
        const Operand& operand = operands_[i];
        Host host(operand.bytes(args_.n));
        if (is_activation(operand)) {
            cpu_.export_activation(operand.shape, args_.n, args_.f(i),
                                   reinterpret_cast<float*>(host.data()));
        } else {
            std::memcpy(host.data(), args_.at[i], host.size());
        }
        return numbers(operand.type, host);
    }

 private:
    static bool is_activation(const Operand& operand) {
        return operand.batched && (operand.type == Type::f32 || operand.type == Type::u8);
    }

    Backend& cpu_;
    const std::vector<Operand>& operands_;
    std::vector<DeviceBuffer<std::byte>> buffers_;
    Args args_;
};

// ---- the suite ----------------------------------------------------------------------------------

struct Ceilings {
    double copy_gbs = 0, fma_tflops = 0, gemm_tflops = 0, gemm_tf32_tflops = 0;
    double call_us = 0;  // of a kernel that does next to nothing
};

class Suite {
 public:
    explicit Suite(const bench::Options& options)
        : options_(options),
          device_(select_device(0)),
          context_{stream_, workspace_, device_.multiprocessors, options.tf32},
          ours_(make_own_kernels(context_)),
          library_(make_library(options.tf32)),
          cpu_(make_cpu_backend(
              std::clamp(static_cast<int>(std::thread::hardware_concurrency()), 1, 16))),
          pool_(stream_) {}

    int run() {
        measure_ceilings();
        add_benchmarks();
        const bool any = benchmark::RunSpecifiedBenchmarks() > 0;
        operands_.reset();
        benchmark::ClearRegisteredBenchmarks();
        return any ? conclude() : 2;
    }

 private:
    std::unique_ptr<LayerKernels> make_library([[maybe_unused]] bool tf32) {
#if defined(GYRE_EMULATED)
        return make_own_kernels(context_);
#else
        try {
            GpuOptions options;
            options.kernels = KernelSet::library;
            options.tf32 = tf32;
            const Context context{stream_, workspace_, device_.multiprocessors, tf32};
            return make_library_kernels(context, options);
        } catch (const Error& error) {
            if (error.code() != ExitCode::usage) {
                throw;
            }
            no_library_ = error.what();
            return nullptr;
        }
#endif
    }

    // ---- ceilings

    // Microseconds of a call: the median over kSamples.
    double time_calls(const Body& body, int calls) {
        Calls batch(stream_, body, calls, false);
        batch.run();
        std::vector<double> samples;
        for (int i = 0; i < kSamples; ++i) {
            samples.push_back(watch_.time([&] { batch.run(); }) / calls);
        }
        return std::max(median(samples), 1e-3);
    }
    double gemm_tflops(bool tf32) {
        const auto kernels = make_library(tf32);
        if (!kernels) {
            return 0.0;
        }
        const LinearShape shape{kGemm, kGemm};
        const Operand square = vector(Role::in, shape.weight_elems());
        OperandSets operands(pool_, {square, square, vector(Role::in, kGemm), square}, 1, 1);
        kernels->prepare_linear("ceiling", shape, kGemm);
        const Args& a = operands.sets()[0];
        const double us = time_calls(
            [&](int) { kernels->linear_forward(shape, kGemm, a.f(0), a.f(1), a.f(2), a.f(3)); }, 2);
        stream_.synchronize();
        return static_cast<double>(shape.flop_per_image()) * kGemm / us / 1e6;
    }
    void measure_ceilings() {
        {
            const auto blocks = static_cast<unsigned>(8 * device_.multiprocessors);
            OperandSets operands(pool_, {vector(Role::out, std::int64_t{blocks} * kFmaBlock)}, 1,
                                 1);
            float* const out = operands.sets()[0].f(0);
            // An idle GPU needs a while to reach its clock; and the first start of a kernel, which
            // loads it, must not be captured.
            const auto begin = std::chrono::steady_clock::now();
            do {
                fma_chains(context_, kFmaRounds, blocks, out);
                own::fill(context_, 4, 1.0f, out);
                stream_.synchronize();
            } while (std::chrono::steady_clock::now() - begin < kClockWarmUp);
            const double us =
                time_calls([&](int) { fma_chains(context_, kFmaRounds, blocks, out); }, 2);
            ceilings_.fma_tflops = fma_flop(kFmaRounds, blocks) / us / 1e6;
            Calls calls(
                stream_, [&](int) { own::fill(context_, 4, 1.0f, out); }, kMostCalls,
                options_.graph);
            calls.run();
            ceilings_.call_us = watch_.time([&] { calls.run(); }) / kMostCalls;
            graphs_work_ = calls.is_graph();
        }
        {
            const Operand large = vector(Role::in, kCopyBytes / sizeof(float));
            OperandSets operands(pool_, {large, large}, 1, 1);
            const Args& a = operands.sets()[0];
            const double us =
                time_calls([&](int) { stream_.copy(a.at[1], a.at[0], kCopyBytes); }, 4);
            ceilings_.copy_gbs = 2.0 * kCopyBytes / us / 1e3;
        }
        ceilings_.gemm_tflops = gemm_tflops(false);
        ceilings_.gemm_tf32_tflops = gemm_tflops(true);
        for (const auto& [name, text] : facts()) {
            benchmark::AddCustomContext(name, text);
        }
    }
    std::vector<std::pair<std::string, std::string>> facts() const {
        const auto number = [](double value) { return fmt::format("{:.2f}", value); };
        return {{"device", device_.name},
                {"ours", ours_->name()},
                {"library", library_ ? kEmulated ? "ours again" : library_->name() : no_library_},
                {"timed", graphs_work_ ? "CUDA graphs" : "plain calls"},
                {"tf32", options_.tf32 ? "on" : "off"},
                {"copy GB/s", number(ceilings_.copy_gbs)},
                {"FMA TFLOP/s", number(ceilings_.fma_tflops)},
                {"fp32 product TFLOP/s", number(ceilings_.gemm_tflops)},
                {"TF32 product TFLOP/s", number(ceilings_.gemm_tf32_tflops)},
                {"smallest kernel us", number(ceilings_.call_us)}};
    }
    // Of an operation: bytes, FLOPs, and the floor they make.
    void set_floor(const Operation& op, Row& row) const {
        const int n = std::max(row.n, 1);
        row.bytes = op.image_bytes * n + op.fixed_bytes;
        row.flop = op.image_flop * n;
        const bool tensor_cores = options_.tf32 && ceilings_.gemm_tf32_tflops > 0;
        const double fp32 = std::max(ceilings_.fma_tflops, ceilings_.gemm_tflops);
        const double tflops = tensor_cores ? ceilings_.gemm_tf32_tflops : fp32;
        const double memory_us = row.bytes / ceilings_.copy_gbs / 1e3;
        const double arithmetic_us = row.flop / tflops / 1e6;
        row.floor_us = std::max(memory_us, arithmetic_us);
        row.bound = memory_us >= arithmetic_us    ? "copy"
                    : tensor_cores                ? "TF32 product"
                    : fp32 > ceilings_.fma_tflops ? "fp32 product"
                                                  : "FMA";
    }

    // ---- one operation at one batch

    struct Case {
        Operation operation;
        int n;  // 0: whatever the batch
        bool verified = false;
        std::string fault;  // what the verification found
    };

    void add_benchmarks() {
        std::vector<int> batches = options_.batches;
        if (batches.empty()) {
            batches = kEmulated ? std::vector{2} : std::vector{64, 256, 1024, 4096};
        }
        for (const bench::Net& net : bench::nets()) {
            for (const int n : batches) {
                for (const bench::Layer& layer : net.layers) {
                    const bool once = std::holds_alternative<bench::ParameterWork>(layer.work);
                    if (once && n != batches.back()) {
                        continue;
                    }
                    Operations operations(net.name, layer.name);
                    std::visit(operations, layer.work);
                    for (Operation& operation : operations.take()) {
                        add_benchmark(std::make_shared<Case>(
                            Case{std::move(operation), once ? 0 : n, false, {}}));
                    }
                }
            }
        }
    }
    void add_benchmark(const std::shared_ptr<Case>& the_case) {
        const Operation& op = the_case->operation;
        Row named;
        named.net = op.net;
        named.layer = op.layer;
        named.direction = op.direction;
        named.n = the_case->n;
        for (const bool ours : {true, false}) {
            if (!ours && (!op.library || !library_)) {
                continue;
            }
            benchmark::RegisterBenchmark(
                (named.name() + (ours ? "/ours" : "/library")).c_str(),
                [=, this](benchmark::State& state) { measure(state, the_case, ours); })
                ->UseManualTime()
                ->Iterations(kSamples)
                ->Unit(benchmark::kMicrosecond);
        }
    }

    void measure(benchmark::State& state, const std::shared_ptr<Case>& the_case, bool ours) {
        const Operation& op = the_case->operation;
        Row& row = report_.row(op.net, op.layer, op.direction, the_case->n);
        row.has_library = static_cast<bool>(op.library);
        set_floor(op, row);
        try {
            if (operands_of_ != the_case.get()) {
                operands_.reset();
                operands_of_ = nullptr;
                row.skipped = prepare(*the_case);
                if (row.skipped.empty()) {
                    operands_ = std::make_unique<OperandSets>(
                        pool_, op.operands, images_of(*the_case), sets_of(*the_case));
                    operands_of_ = the_case.get();
                }
            }
            if (!row.skipped.empty()) {
                state.SkipWithError(row.skipped.c_str());
                return;
            }
            if (!the_case->verified) {
                the_case->verified = true;
                the_case->fault = verify(*the_case);
                if (!the_case->fault.empty()) {
                    faults_.push_back(row.name() + ": " + the_case->fault);
                }
            }
            if (!the_case->fault.empty()) {
                row.skipped = the_case->fault;
                state.SkipWithError(the_case->fault.c_str());
                return;
            }
            (ours ? row.ours_us : row.library_us) = time(state, op, ours);
        } catch (const Error& error) {
            faults_.push_back(row.name() + ": " + error.what());
            row.skipped = error.what();
            state.SkipWithError(error.what());
            return;
        }
        const double us = ours ? row.ours_us : row.library_us;
        state.counters["median_us"] = us;
        state.counters["GB/s"] = row.bytes / us / 1e3;
        state.counters["%ceiling"] = 100.0 * row.floor_us / us;
        if (row.flop > 0) {
            state.counters["TFLOP/s"] = row.flop / us / 1e6;
        }
        if (!ours && row.ours_us > 0) {
            state.counters["ratio"] = row.ratio();
        }
    }

    static int images_of(const Case& c) {
        return std::max(c.n, 1);
    }
    static std::size_t sets_of(const Case& c) {
        const std::size_t bytes = OperandSets::set_bytes(c.operation.operands, images_of(c));
        return std::clamp<std::size_t>((kRotate + bytes - 1) / bytes, 1, kMostSets);
    }
    // Returns why it cannot be timed, or nothing.
    std::string prepare(const Case& c) {
        const int n = images_of(c);
        const std::size_t set = OperandSets::set_bytes(c.operation.operands, n);
        // Libraries choose their algorithms on operands of their own, and with room to work in.
        constexpr std::size_t kRoom = (kEmulated ? 64 : 768) * kMiB;
        const std::size_t needed = std::max(set * sets_of(c), set) + kRoom, free = free_memory();
        if (needed > free) {
            return fmt::format("needs {} MiB of GPU memory, {} MiB are free", needed / kMiB,
                               free / kMiB);
        }
        if (c.operation.prepare) {
            c.operation.prepare(*ours_, n);
            if (library_) {
                c.operation.prepare(*library_, n);
            }
        }
        return {};
    }

    Gpu gpu(bool ours) {
        return {context_, ours ? *ours_ : *library_};
    }
    void call(const Operation& op, bool ours, const Args& args) {
        (ours ? op.ours : op.library)(gpu(ours), args);
    }
    void set_up(const Operation& op, bool ours, const Args& args) {
        if (op.set_up) {
            op.set_up(gpu(ours), args);
        }
    }

    double time(benchmark::State& state, const Operation& op, bool ours) {
        std::vector<Args>& sets = operands_->sets();
        for (Args& args : sets) {
            args.timed = true;
            set_up(op, ours, args);
        }
        const Body body = [&](int i) {
            call(op, ours, sets[static_cast<std::size_t>(i) % sets.size()]);
        };
        for (int i = 0; i < kWarmUps; ++i) {
            body(i);
        }
        const double once = std::max(watch_.time([&] {
            body(0);
            body(1);
        }) / 2.0,
                                     0.1);
        const double wanted =
            std::max(std::ceil(kBatchUs / once), static_cast<double>(sets.size()));
        const int calls = static_cast<int>(std::clamp(wanted, 1.0, double{kMostCalls}));
        Calls batch(stream_, body, calls, options_.graph);
        batch.run();
        stream_.synchronize();
        std::vector<double> samples;
        for (auto _ : state) {
            samples.push_back(watch_.time([&] { batch.run(); }) / calls);
            state.SetIterationTime(samples.back() * 1e-6);
        }
        stream_.synchronize();
        if (options_.graph && !kEmulated && !batch.is_graph()) {
            state.SetLabel("plain calls: it could not be captured");
        }
        return std::max(median(samples), 1e-3);
    }

    // ---- verification

    Host download(const void* device, std::size_t bytes) {
        Host host(bytes);
        stream_.download(host.data(), device, bytes);
        stream_.synchronize();
        return host;
    }
    // Runs an operation once; outputs are poisoned before, and set_up() done.
    void run_once(const Operation& op, bool ours, const Args& args) {
        set_up(op, ours, args);
        for (std::size_t i = 0; i < op.operands.size(); ++i) {
            if (op.operands[i].role == Role::out) {
                pool_.poison(op.operands[i], args.n, args.at[i]);
            }
        }
        call(op, ours, args);
        stream_.synchronize();
    }
    std::string judge(const Operation& op, const std::string& what, std::size_t operand,
                      const Numbers& found, const Numbers& expected) const {
        const double error = relative_error(found, expected);
        const double tolerance = op.is_product && options_.tf32 ? kToleranceTf32 : kTolerance;
        if (error <= tolerance) {
            return {};
        }
        return fmt::format(
            "WRONG: {}: operand {} is off by {:.1e} of its norm, at most {:.0e} is "
            "right",
            what, operand, error, tolerance);
    }

    std::string verify(const Case& c) {
        std::string fault = verify_against_cpu(c.operation, images_of(c));
        return fault.empty() ? verify_at_full_batch(c.operation) : fault;
    }
    std::string verify_against_cpu(const Operation& op, int n) {
        double few = n;
        if (op.image_flop > 0) {
            few = std::min(few, kReferenceFlop / op.image_flop);
        }
        if (op.image_bytes > 0) {
            few = std::min(few, static_cast<double>(kReferenceBytes) / op.image_bytes);
        }
        n = std::max(1, static_cast<int>(few));
        OperandSets operands(pool_, op.operands, n, 1);
        const Args& args = operands.sets()[0];
        std::vector<Host> inputs;
        for (std::size_t i = 0; i < op.operands.size(); ++i) {
            inputs.push_back(
                op.operands[i].is_input() ? download(args.at[i], op.operands[i].bytes(n)) : Host{});
        }
        CpuOperands expected(*cpu_, op.operands, n, inputs);
        if (op.cpu_set_up) {
            op.cpu_set_up({*cpu_}, expected.args());
        }
        op.reference({*cpu_}, expected.args());
        for (const bool ours : {true, false}) {
            if (!ours && (!op.library || !library_)) {
                continue;
            }
            run_once(op, ours, args);
            for (std::size_t i = 0; i < op.operands.size(); ++i) {
                const Operand& operand = op.operands[i];
                if (!operand.is_output() || (!ours && operand.ours_alone)) {
                    continue;
                }
                const auto found = numbers(operand.type, download(args.at[i], operand.bytes(n)));
                const std::string what =
                    fmt::format("{} against the CPU at {} images", ours ? "ours" : "library", n);
                if (std::string fault = judge(op, what, i, found, expected.read(i));
                    !fault.empty()) {
                    return fault;
                }
            }
        }
        return {};
    }
    // The begin and the end of an output of the first set.
    Numbers ends(const Operation& op, std::size_t i) {
        const Args& args = operands_->sets()[0];
        const Operand& operand = op.operands[i];
        const auto elems = static_cast<std::size_t>(operand.elems(args.n));
        const std::size_t each = operand.bytes(args.n) / elems;
        const std::size_t part = std::min(elems, kComparedElems) * each;
        Numbers values = numbers(operand.type, download(args.at[i], part));
        const auto* const end = static_cast<const char*>(args.at[i]) + elems * each;
        const Numbers last = numbers(operand.type, download(end - part, part));
        values.insert(values.end(), last.begin(), last.end());
        return values;
    }
    // Without a library: all that is there to see is whether everything was written.
    std::string verify_at_full_batch(const Operation& op) {
        const Args& args = operands_->sets()[0];
        std::vector<Numbers> found;
        run_once(op, true, args);
        for (std::size_t i = 0; i < op.operands.size(); ++i) {
            found.push_back(op.operands[i].is_output() ? ends(op, i) : Numbers{});
            for (const double value : found.back()) {
                if (!std::isfinite(value)) {
                    return fmt::format("WRONG: ours at {} images: operand {} has NaN or infinity",
                                       args.n, i);
                }
            }
        }
        if (!op.library || !library_) {
            return {};
        }
        run_once(op, false, args);
        for (std::size_t i = 0; i < op.operands.size(); ++i) {
            if (op.operands[i].is_output() && !op.operands[i].ours_alone) {
                const std::string what =
                    fmt::format("ours against the library at {} images", args.n);
                if (std::string fault = judge(op, what, i, found[i], ends(op, i)); !fault.empty()) {
                    return fault;
                }
            }
        }
        return {};
    }

    // ---- the end

    int conclude() {
        fmt::print("\n");
        for (const auto& [name, text] : facts()) {
            fmt::print("{:<22} {}\n", name, text);
        }
        fmt::print(
            "\nratio: library's time over ours, > 1: ours is faster; %: of the ceiling in the last "
            "column; GB/s, TFLOP/s: ours\n{}",
            report_.table());
        if (kEmulated) {
            fmt::print("\nemulated: the times mean nothing, and ours ran in the library's place\n");
        }
        for (const std::string& fault : faults_) {
            fmt::print("{}\n", fault);
        }
        fmt::print("wrong results and errors: {}\n", faults_.size());
        std::vector<std::string> missed;
        if (options_.check) {
            missed = report_.missed_goals();
            for (const std::string& line : missed) {
                fmt::print("MISSED: {}\n", line);
            }
            fmt::print("goals missed: {}{}\n", missed.size(),
                       kEmulated ? " (not judged: emulated)" : "");
        }
        return !faults_.empty() ? 1 : missed.empty() || kEmulated ? 0 : 3;
    }

    const bench::Options options_;
    const DeviceProperties device_;  // first of what is on the GPU: it makes the device current
    Stream stream_;
    Workspace workspace_{stream_};
    const Context context_;
    Stopwatch watch_{stream_};
    std::string no_library_;
    std::unique_ptr<LayerKernels> ours_, library_;
    std::unique_ptr<Backend> cpu_;
    ValuePool pool_;
    Ceilings ceilings_;
    bool graphs_work_ = false;
    const Case* operands_of_ = nullptr;
    std::unique_ptr<OperandSets> operands_;
    bench::Report report_;
    std::vector<std::string> faults_;
};

}  // namespace

int run_benchmarks(const bench::Options& options) {
    return Suite(options).run();
}

}  // namespace gyre::SIMT_NAMESPACE
