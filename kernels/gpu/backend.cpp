// A GPU backend on two streams of one device. Compiled twice: for a real GPU and for the emulated
// one.
#include "kernels/gpu/backend.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <optional>
#include <vector>

#include "base/error.hpp"
#include "kernels/gpu/auto_factory.hpp"
#if !defined(GYRE_EMULATED)
#include "kernels/cudnn/factory.hpp"
#endif

// Header-only; without a profiler a range costs a few nanoseconds.
#if !defined(GYRE_EMULATED) && __has_include(<nvtx3/nvToolsExt.h>)
#include <nvtx3/nvToolsExt.h>
#define GYRE_HAVE_NVTX
#endif

namespace gyre::SIMT_NAMESPACE {

namespace {

namespace own = gyre::SIMT_NAMESPACE;

class GpuBackend final : public Backend {
 public:
    explicit GpuBackend(const GpuOptions& options)
        : device_(select_device(options.device, options.share)),
          workspace_(compute_),
          context_{compute_, workspace_, device_.multiprocessors, options.tf32,
                   device_.shared_bytes},
          own_kernels_(options.kernels == KernelSet::ours),
          factories_(make_factories(options)) {}
    ~GpuBackend() override { finish_quietly(); }

    std::string description() const override {
        return fmt::format("{}, {}", device_.name, factories_.front()->description());
    }

    void* allocate(std::size_t bytes) override {
        void* memory = own::allocate(std::max<std::size_t>(bytes, 1));
        compute_.fill_zero(memory, bytes);
        compute_.synchronize();
        return memory;
    }
    void release(void* memory) noexcept override {
        if (memory == nullptr) {
            return;
        }
        finish_quietly();
        own::release(memory);
    }
    void upload(void* device, const void* host, std::size_t bytes) override {
        compute_.upload(device, host, bytes);
        compute_.synchronize();
    }
    void download(void* host, const void* device, std::size_t bytes) override {
        compute_.download(host, device, bytes);
        compute_.synchronize();
    }
    void copy(void* to, const void* from, std::size_t bytes) override {
        compute_.copy(to, from, bytes);
    }
    void fill_zero(void* device, std::size_t bytes) override { compute_.fill_zero(device, bytes); }
    void synchronize() override {
        compute_.synchronize();
        copy_.synchronize();
    }

    void* allocate_pinned(std::size_t bytes) override { return own::allocate_pinned(bytes); }
    void release_pinned(void* memory) noexcept override {
        finish_quietly();  // after an error, transfers to it may be in flight
        own::release_pinned(memory);
    }
    Event download_async(Device::Stream stream, void* host, const void* device,
                         std::size_t bytes) override {
        own::Stream& queue = begin_on(stream);
        queue.download(host, device, bytes);
        return record(queue);
    }
    Event upload_async(Device::Stream stream, void* device, const void* host,
                       std::size_t bytes) override {
        own::Stream& queue = begin_on(stream);
        queue.upload(device, host, bytes);
        return record(queue);
    }
    Event submit_to_copy_stream(const std::function<void(void*)>& submit) override {
        own::Stream& queue = begin_on(Device::Stream::copy);
        submit(queue.handle());
        return record(queue);
    }
    Event record() override { return capturing_ == nullptr ? record(compute_) : record_launches(); }
    double seconds_between(Event begin, Event end) override {
        return 1e-3 * double{own::Event::milliseconds(event(begin), event(end))};
    }
    void wait(Event point) override { compute_.wait(event(point)); }
    void synchronize(Event point) override { event(point).synchronize(); }
#if defined(GYRE_HAVE_NVTX)
    void push_range(const char* name) override {
        nvtxRangePushA(name);
    }
    void pop_range() override {
        nvtxRangePop();
    }
#endif
    bool can_capture() const override {
        return true;
    }
    std::unique_ptr<Device::Graph> capture(const std::function<void()>& calls) override {
        auto graph = std::make_unique<CapturedCalls>(*this);
        capturing_ = graph.get();
        try {
            graph->graph.emplace(compute_, calls);
        } catch (...) {
            capturing_ = nullptr;
            throw;
        }
        capturing_ = nullptr;
        workspace_.captured();
        return graph;
    }
    bool host_memory() const override {
        return false;
    }
    DeviceIdentity device_identity() const override {
#if defined(GYRE_EMULATED)
        constexpr bool emulated = true;
#else
        constexpr bool emulated = false;
#endif
        return {device_.bus_id, device_.uuid, emulated};
    }

    std::unique_ptr<Op> make(const std::string& name, const OpSpec& spec, const OpSizes& sizes,
                             DataType type) override {
        if (is_fused(spec) && factories_.size() > 1) {
            return nullptr;  // so that the faster kernel can be chosen for each part
        }
        for (const auto& factory : factories_) {
            if (std::unique_ptr<Op> op = factory->make(name, spec, sizes, type)) {
                return op;
            }
        }
        return nullptr;
    }
    std::unique_ptr<TrainingPass> make_pass(const TrainingPassSpec& spec) override {
        return own_kernels_ ? make_training_pass(context_, spec) : nullptr;
    }
    std::unique_ptr<LossHead> make_loss_head(const LinearSpec& spec, int images,
                                             DataType type) override {
        return own_kernels_ ? own::make_loss_head(context_, spec, images, type) : nullptr;
    }
    std::string choices() const override {
        return factories_.front()->choices();
    }

    std::int64_t activation_elems(const Shape& shape, int n) const override {
        return shape.elems() * n;
    }
    void import_activation(const Shape& shape, int n, const float* host, float* x) override {
        upload(x, host, static_cast<std::size_t>(activation_elems(shape, n)) * sizeof(float));
    }
    void export_activation(const Shape& shape, int n, const float* x, float* host) override {
        download(host, x, static_cast<std::size_t>(activation_elems(shape, n)) * sizeof(float));
    }

    void next_samples(const NextSamplesArgs& args, int n, std::int32_t* samples) override {
        own::next_samples(context_, args, n, samples);
    }
    void gather(const GatherArgs& args, int n, const Tensor& x, std::int32_t* y) override {
        if (n > 0) {
            own::gather(context_, args, n, x, y);
        }
    }
    void gather_next(const NextSamplesArgs& next, const GatherArgs& args, int n,
                     std::int32_t* samples, const Tensor& x, std::int32_t* y) override {
        if (n > 0) {
            own::gather_next(context_, next, args, n, samples, x, y);
        } else {
            own::next_samples(context_, next, n, samples);
        }
    }
    void cross_entropy(const CrossEntropyArgs& args, int n) override {
        if (n > 0) {
            own::cross_entropy(context_, args, n);
        } else {
            own::fill(context_, 2, 0.0f, args.sums);
        }
    }
    void sum_of_squares(std::int64_t elems, const float* x, const FiniteCheck& finite,
                        ExactSum* sum) override {
        own::sum_of_squares(context_, elems, x, finite, sum);
    }
    void scale_to_norm(const ClipArgs& args, std::int64_t elems, float* x) override {
        own::scale_to_norm(context_, args, elems, x);
    }
    void unscale(std::int64_t elems, const LossScale* state, const FiniteCheck& finite,
                 float* g) override {
        own::unscale(context_, elems, state, finite, g);
    }
    void decide_step(const LossScaleArgs& args) override {
        own::decide_step(context_, args);
    }
    void add(std::int64_t elems, const float* x, float* y) override {
        own::add(context_, elems, x, y);
    }
    void narrow(DataType type, std::int64_t elems, const float* x, std::uint16_t* y,
                const float* factor) override {
        own::narrow(context_, type, elems, x, y, factor);
    }
    void widen(DataType type, std::int64_t elems, const std::uint16_t* x, float* y) override {
        own::widen(context_, type, elems, x, y);
    }
    void round_to(DataType type, std::int64_t elems, const float* x, float* y) override {
        own::round_to(context_, type, elems, x, y);
    }
    void update(const UpdateArgs& args, std::int64_t elems, float* p, const float* g) override {
        own::update(context_, args, elems, p, g);
    }

 private:
    static constexpr std::size_t kEvents = kKeptEvents;

    struct CapturedCalls final : Device::Graph {
        explicit CapturedCalls(GpuBackend& backend_) : backend(backend_) {}
        ~CapturedCalls() override {
            graph.reset();
            for (const Device::Event event : events) {
                backend.launch_events_.erase(event);
            }
        }
        void launch() override { graph->launch(backend.compute_); }

        GpuBackend& backend;
        std::optional<own::Graph> graph;
        std::vector<Device::Event> events;
    };

    // The first factory that has an operation creates it.
    using Factories = std::vector<std::unique_ptr<KernelFactory>>;
    Factories make_factories(const GpuOptions& options) {
        Factories factories;
        factories.push_back(make_own_factory(context_));
        if (options.kernels == KernelSet::ours) {
            return factories;
        }
#if defined(GYRE_EMULATED)
        if (options.kernels == KernelSet::library) {
            throw usage_error(
                "`device` emulated runs gyre's own kernels only: cuDNN and cuBLASLt need a GPU; "
                "use `kernels` ours");
        }
        auto library = make_own_factory(context_);  // to exercise the choice of kernels
#else
        auto library = make_library_factory(context_, options.deterministic);
#endif
        if (options.kernels == KernelSet::automatic) {
            library = make_auto_factory(context_, options, device_.name, make_own_factory(context_),
                                        std::move(library));
        }
        factories.insert(factories.begin(), std::move(library));
        return factories;
    }
    void finish_quietly() noexcept {
        try {
            synchronize();
        } catch (const Error&) {
            // Already reported by the caller that waited for the work.
        }
    }
    own::Stream& begin_on(Device::Stream stream) {
        if (stream == Device::Stream::compute) {
            return compute_;
        }
        compute_.record(computed_);
        copy_.wait(computed_);
        return copy_;
    }
    // Events are reused in turn. A reused one marks a later point of its stream, so waiting for an
    // old event waits longer than needed, never shorter.
    Event record(own::Stream& stream) {
        if (events_.size() < kEvents) {
            events_.push_back(std::make_unique<own::Event>());
        }
        stream.record(event(next_));
        return next_++;
    }
    // Events of launches are numbered downwards from -1.
    Event record_launches() {
        const Event number = --last_launch_event_;
        compute_.record_in_launches(launch_events_[number]);
        capturing_->events.push_back(number);
        return number;
    }
    own::Event& event(Event number) {
        if (number < 0) {
            return launch_events_.at(number);
        }
        return *events_[static_cast<std::size_t>(number) % kEvents];
    }

    const DeviceProperties device_;  // first, as it makes the device current
    own::Stream compute_;
    own::Stream copy_{true};      // high priority: other ranks and the host wait for its work
    own::Event computed_{false};  // only for ordering
    Workspace workspace_;
    const Context context_;
    const bool own_kernels_;
    std::vector<std::unique_ptr<own::Event>> events_;
    Event next_ = 0;
    std::map<Event, own::Event> launch_events_;  // of all graphs
    Event last_launch_event_ = 0;
    CapturedCalls* capturing_ = nullptr;
    const Factories factories_;
};

}  // namespace

std::unique_ptr<Backend> make_gpu_backend(const GpuOptions& options) {
    return std::make_unique<GpuBackend>(options);
}

}  // namespace gyre::SIMT_NAMESPACE
