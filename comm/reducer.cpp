#include "comm/reducer.hpp"

#include <algorithm>
#include <exception>
#include <string>
#include <utility>

namespace gyre::comm {
namespace {

// The device keeps a number of events. Of an operation: StepEvents' three, and two of its way; the
// rest is for others, such as the results of the steps and sums within a pass.
constexpr std::int64_t kEventsOfOperation = 5, kEventsOfOthers = 512;
constexpr std::int64_t kMostOperations =
    (Device::kKeptEvents - kEventsOfOthers) / (kEventsOfOperation * Reducer::kMostSteps);
static_assert(kMostParts < kMostOperations, "of each step");

// The device's work up to an event, as a request.
class Passed final : public Request {
 public:
    explicit Passed(Device& device) : device_(device), event_(device.record()) {}
    void wait() override { device_.synchronize(event_); }
    bool wait_on_stream() override { return false; }  // the device does in any case

 private:
    Device& device_;
    const Device::Event event_;
};

}  // namespace

Reducer::Reducer(Communicator& comm, Device& device, std::vector<Bucket> buckets, float* gradients,
                 DataType type, std::int64_t exact_from, SumOrder order)
    : comm_(comm),
      device_(device),
      buckets_(std::move(buckets)),
      transport_(comm, device, gradients, buckets_.front().end, type, exact_from, order) {
    if (!direct() && std::any_of(buckets_.begin(), buckets_.end(),
                                 [](const Bucket& bucket) { return bucket.shared(); })) {
        throw Error(ExitCode::internal,
                    "shares of gradients that travel through the host's memory");
    }
}

Reducer::Step& Reducer::add_step() {
    // A graph's events are its own.
    const auto eager = std::count_if(steps_.begin(), steps_.end(),
                                     [](const Step& step) { return !step.launched; });
    if (!capturing_ && eager == kMostSteps) {
        throw Error(ExitCode::internal, "more steps under way than the device keeps events for");
    }
    ++step_;
    return steps_.emplace_back();
}

void Reducer::begin_step() {
    Step& step = add_step();
    step.timeline = timeline_;
    if (comm_.size() > 1) {
        step.events.begin = device_.record();
        const std::size_t most = 2 * buckets_.size() + 1;  // with what gather_updates() adds
        step.events.operations.reserve(most);
        step.operations.reserve(most);
    }
}

Reducer::Operation& Reducer::add_operation(const Bucket& bucket, bool gathers) {
    Step& step = steps_.back();
    if (step.operations.size() == kMostOperations) {
        throw Error(ExitCode::internal,
                    "more collectives in a step than the device keeps events for");
    }
    step.events.operations.push_back({.gathers = gathers, .ready = device_.record()});
    return step.operations.emplace_back(Operation{.bucket = bucket});
}

void Reducer::start(std::size_t index, Collective collective) {
    collective.origin = {step_, "bucket", static_cast<int>(index)};
    Operation& operation = steps_.back().operations[index];
    operation.request = comm_.start(collective);
    if (steps_.back().timeline != nullptr) {
        operation.label = label_of(collective);
    }
}

void Reducer::all_gather(float* data, std::int64_t count, const Bucket& range,
                         std::function<void()> then) {
    add_operation(range, true).then = std::move(then);
    start(steps_.back().operations.size() - 1,
          {.kind = Collective::Kind::all_gather, .data = data, .count = count});
}

void Reducer::ready(std::int64_t begin) {
    if (comm_.size() == 1) {
        return;
    }
    Step& step = steps_.back();
    for (; step.buckets < buckets_.size() && buckets_[step.buckets].begin >= begin;
         ++step.buckets) {
        const Bucket& bucket = buckets_[step.buckets];
        add_operation(bucket, false).packed = transport_.pack(bucket);
        if (direct()) {
            start(step.operations.size() - 1, transport_.reduction(bucket));
        }
    }
}

void Reducer::run(Collective collective, const char* part) {
    if (steps_.empty()) {
        comm_.start(collective)->wait();
        return;
    }
    Step& step = steps_.back();
    collective.origin = {step_, part, step.others_run++};
    const TimelineSpan span(step.timeline, "wait for", part);
    auto request = comm_.start(collective);
    if (!request->wait_on_stream()) {
        step.others.push_back(std::move(request));
    } else if (step.timeline != nullptr) {
        double any = 0.0;
        record(*step.timeline, *request, label_of(collective), std::nullopt, any);
    }
}

void Reducer::gather_updates(float* data, std::int64_t count) {
    if (comm_.size() > 1) {
        add_operation({}, true);
        start(steps_.back().operations.size() - 1,
              {.kind = Collective::Kind::all_gather, .data = data, .count = count});
    }
}

void Reducer::wait_on_stream(std::size_t index) {
    Step& step = steps_.back();
    StepEvents::Operation& events = step.events.operations[index];
    events.waited = device_.record();
    step.operations[index].request->wait_on_stream();
    transport_.receive(step.operations[index].bucket);
    events.arrived = device_.record();
}

void Reducer::finish_step(FunctionRef<void(const Bucket&)> arrived,
                          FunctionRef<void()> all_arrived) {
    const auto finish = [&] {
        if (all_arrived) {
            all_arrived();
        }
    };
    if (comm_.size() == 1) {
        arrived({0, buckets_.front().end});
        finish();
        return;
    }
    Step& step = steps_.back();
    if (!direct()) {
        // The device is still computing while the first buckets arrive.
        for (std::size_t i = 0; i < step.operations.size(); ++i) {
            device_.synchronize(step.operations[i].packed);
            start(i, transport_.reduction(step.operations[i].bucket));
        }
    }
    const std::size_t sums = step.operations.size();
    for (std::size_t i = 0; i < sums; ++i) {
        wait_on_stream(i);
        // A copy, as what is called here may gather, which adds operations.
        const Bucket bucket = step.operations[i].bucket;
        const auto& then = step.operations[i].then;
        if (!step.events.operations[i].gathers) {
            transport_.unpack(bucket);
            arrived(bucket);
        } else if (then) {
            then();
            arrived(bucket);
        }
    }
    finish();
    for (std::size_t i = sums; i < step.operations.size(); ++i) {
        wait_on_stream(i);
    }
}

Reducer::Captured Reducer::capture(const std::function<void()>& calls) {
    const auto before = static_cast<std::ptrdiff_t>(steps_.size());
    const std::int64_t number = step_;
    Captured captured;
    std::exception_ptr failure;
    capturing_ = true;
    try {
        captured.graph = device_.capture(calls);
    } catch (...) {
        failure = std::current_exception();
    }
    capturing_ = false;
    // Nothing has run: these were no steps, and their requests cannot be waited for.
    step_ = number;
    for (auto step = steps_.begin() + before; step != steps_.end(); ++step) {
        for (Operation& operation : step->operations) {
            step->others.push_back(std::move(operation.request));
        }
        for (const auto& request : step->others) {
            if (request != nullptr) {  // where it failed to start
                request->abandon();
            }
        }
        captured.steps.push_back(std::move(step->events));
        captured.collectives += step->others.size();
    }
    steps_.resize(static_cast<std::size_t>(before));
    if (failure != nullptr) {
        std::rethrow_exception(failure);
    }
    return captured;
}

void Reducer::launch(const Captured& captured) {
    captured.graph->launch();
    std::unique_ptr<Request> graph;
    if (comm_.size() > 1) {
        graph = comm_.track(
            std::make_unique<Passed>(device_),
            {.name = "graph with " + std::to_string(captured.collectives) + " reductions",
             .bytes = buckets_.front().end * std::int64_t{sizeof(float)} *
                      static_cast<std::int64_t>(captured.steps.size()),
             .origin = {step_ + 1, "bucket", 0}});
        graph->wait_on_stream();
    }
    for (const StepEvents& events : captured.steps) {
        Step& step = add_step();
        step.launched = true;
        step.events = events;
        step.graph = std::move(graph);  // the others are complete when the first is
    }
}

// On the device a collective begins when its data is final and the one before it is done;
// free_from: when that was.
void Reducer::record(Timeline& timeline, const Request& request, const Label& label,
                     std::optional<Device::Event> ready, double& free_from) {
    const auto ran = request.ran();
    if (!ran) {
        return;
    }
    double begin = timeline.seconds_at(ran->begin), end = timeline.seconds_at(ran->end);
    if (ran->event) {
        begin = std::max(free_from, ready ? timeline.seconds_at(*ready) : free_from);
        end = std::max(begin, timeline.seconds_at(*ran->event));
    }
    free_from = end;
    timeline.add_collective(std::string(label.origin.part) + " " +
                                std::to_string(label.origin.index) + " " + label.name,
                            begin, end, label.bytes);
}

// Records the waits and collectives of a step whose events have passed.
void Reducer::record(Timeline& timeline, const Step& step) {
    double free_from = 0.0;
    for (std::size_t i = 0; i < step.operations.size(); ++i) {
        const StepEvents::Operation& events = step.events.operations[i];
        timeline.add("wait for bucket " + std::to_string(i), events.waited, events.arrived);
        record(timeline, *step.operations[i].request, step.operations[i].label, events.ready,
               free_from);
    }
}

Reducer::Times Reducer::synchronize_step() {
    const Step step = std::move(steps_.front());
    steps_.erase(steps_.begin());
    if (step.graph != nullptr) {
        step.graph->wait();  // before that, its events may still be those of an earlier launch
    }
    for (std::size_t i = 0; i < step.operations.size(); ++i) {
        // First, what the rank itself computed: the request's wait is for the other ranks alone.
        device_.synchronize(step.events.operations[i].ready);
        step.operations[i].request->wait();
    }
    for (const auto& request : step.others) {
        request->wait();  // complete, as the device has waited for it
    }
    Times times = measure(device_, step.events);
    if (step.timeline != nullptr) {
        record(*step.timeline, step);
    }
    return times;
}

}  // namespace gyre::comm
