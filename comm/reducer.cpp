#include "comm/reducer.hpp"

#include <algorithm>
#include <exception>
#include <string>
#include <utility>

#include "base/round_up.hpp"

namespace gyre::comm {
namespace {

// The device keeps a number of events. Of an operation: StepEvents' three, and two of its way; of a
// sum within a pass, two; the rest is for others, such as the results of the steps. A step with
// more sums times the first ones.
constexpr std::int64_t kEventsOfOperation = 5, kMostStatistics = 600, kEventsOfOthers = 512;
constexpr std::int64_t kMostOperations =
    (Device::kKeptEvents - kEventsOfOthers - 2 * kMostStatistics * Reducer::kMostSteps) /
    (kEventsOfOperation * Reducer::kMostSteps);
static_assert(kMostParts < kMostOperations, "of each step");

// Whole vectors of a kernel, so that those of the next rank begin where one does.
std::int64_t aligned(std::int64_t elems) {
    constexpr std::int64_t kAlignElems = 16;
    return round_up(elems, kAlignElems);
}

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
                 GradientRoute* factors, const ShardSums& shards)
    : comm_(comm),
      device_(device),
      buckets_(std::move(buckets)),
      direct_(comm.size() == 1 || comm.use_device(device)),
      shards_(shards) {
    routes_[static_cast<std::size_t>(Route::factors)] = factors;
    for (const Bucket& bucket : buckets_) {
        GradientRoute*& route = routes_[static_cast<std::size_t>(bucket.route)];
        if (route == nullptr && comm.size() > 1) {
            own_routes_.push_back(
                make_route(bucket.route, comm, device, gradients, buckets_, shards));
            route = own_routes_.back().get();
        }
    }
    if (comm.size() > 1 && shards.shards > 0 && !shards.by_library && shards.pass_elems > 0) {
        const std::int64_t elems = aligned(shards.pass_elems);
        ShardSums in_pass = shards;
        in_pass.earlier.clear();
        for (std::size_t i = 0; i <= shards.earlier.size(); ++i) {
            pass_nodes_.emplace_back(device, elems);
            if (i < shards.earlier.size()) {
                in_pass.earlier.push_back(pass_nodes_.back().get());
            }
        }
        pass_route_ = make_route(Route::fixed_order, comm, device, pass_nodes_.back().get(),
                                 {{0, elems}}, in_pass);
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
        const std::size_t most = 2 * buckets_.size() + 1;  // a bucket has two collectives at most
        step.events.operations.reserve(most);
        step.operations.reserve(most);
    }
}

Device::Event Reducer::to_host(Device::Stream stream, Staging& staging,
                               const Collective& collective) {
    const std::int64_t bytes = all_of(collective, comm_.size()).bytes;
    if (staging.elems() < bytes) {  // the first time
        device_.synchronize();
        staging = {device_, bytes};
    }
    const ByteRange sent = sent_by(comm_.rank(), collective, comm_.size());
    return device_.download_async(stream, staging.get() + sent.begin_bytes,
                                  static_cast<const std::byte*>(collective.data) + sent.begin_bytes,
                                  static_cast<std::size_t>(sent.bytes));
}

Device::Event Reducer::from_host(Device::Stream stream, const Staging& staging,
                                 const Collective& collective) {
    const ByteRange received = received_by(comm_.rank(), collective, comm_.size());
    return device_.upload_async(
        stream, static_cast<std::byte*>(collective.data) + received.begin_bytes,
        staging.get() + received.begin_bytes, static_cast<std::size_t>(received.bytes));
}

void Reducer::add_operation(const Collective& collective, int bucket) {
    Step& step = steps_.back();
    const std::size_t index = step.operations.size();
    if (index == kMostOperations) {
        throw Error(ExitCode::internal,
                    "more collectives in a step than the device keeps events for");
    }
    step.events.operations.push_back({.bucket = bucket, .ready = device_.record()});
    Operation& operation =
        step.operations.emplace_back(Operation{.collective = collective, .bucket = bucket});
    operation.collective.origin = {step_, "bucket", static_cast<int>(index)};
    if (direct()) {
        start(index);
        return;
    }
    staging_.resize(std::max(staging_.size(), index + 1));
    operation.staged = to_host(Device::Stream::copy, staging_[index], collective);
}

void Reducer::start(std::size_t index) {
    Operation& operation = steps_.back().operations[index];
    Collective collective = operation.collective;
    if (!direct()) {
        collective.data = staging_[index].get();
    }
    operation.request = comm_.start(collective);
    if (steps_.back().timeline != nullptr) {
        operation.label = label_of(collective);
    }
}

void Reducer::ready(std::int64_t begin) {
    if (comm_.size() == 1) {
        return;
    }
    Step& step = steps_.back();
    for (; step.buckets < buckets_.size() && buckets_[step.buckets].begin >= begin;
         ++step.buckets) {
        const Bucket& bucket = buckets_[step.buckets];
        GradientRoute& route = route_of(bucket);
        route.pack(bucket);
        for (int i = 0; i < route.collectives(); ++i) {
            add_operation(route.collective(bucket, i), static_cast<int>(step.buckets));
        }
    }
}

void Reducer::run(const Collective& collective, const char* part) {
    Collective run = collective;
    if (!direct()) {
        device_.synchronize(to_host(Device::Stream::compute, others_staging_, collective));
        run.data = others_staging_.get();
    }
    if (steps_.empty()) {
        comm_.start(run)->wait();
    } else {
        Step& step = steps_.back();
        run.origin = {step_, part, step.others_run++};
        const TimelineSpan span(step.timeline, "wait for", part);
        auto request = comm_.start(run);
        if (!request->wait_on_stream()) {
            step.others.push_back(std::move(request));
        } else if (step.timeline != nullptr) {
            double any = 0.0;
            record(*step.timeline, *request, label_of(run), std::nullopt, any);
        }
    }
    if (!direct()) {
        // On one stream: the next download starts when this upload has read the memory.
        from_host(Device::Stream::compute, others_staging_, collective);
    }
}

void Reducer::sum(const LeafValues& values) {
    const bool timed = comm_.size() > 1 && !steps_.empty() &&
                       std::ssize(steps_.back().events.statistics) < kMostStatistics;
    const Device::Event waited = timed ? device_.record() : 0;
    add_leaves(values);
    if (pass_route_ != nullptr) {
        sum_nodes(values);
    } else if (comm_.size() > 1) {
        run({.kind = Collective::Kind::all_reduce,
             .data = values.data,
             .count = values.elems,
             .in_tree = shards_.by_library && shards_.shards > 0},
            "statistics");
    }
    if (timed) {
        steps_.back().events.statistics.push_back({waited, device_.record()});
    }
}

void Reducer::add_leaves(const LeafValues& values) {
    leaf_nodes_.clear();
    const int first = shards_.shards > 0 ? shards_.own(comm_.rank()).first : 0;
    for (int leaf = 0; leaf < values.leaves; ++leaf) {
        push_node(leaf_nodes_, {first + leaf, first + leaf + 1},
                  values.data + leaf * values.stride_elems, shards_.shards,
                  [&](float* left, float* right) { device_.add(values.elems, right, left); });
    }
}

void Reducer::sum_nodes(const LeafValues& values) {
    const std::vector<std::pair<TreeNode, float*>>& nodes = leaf_nodes_;
    const auto bytes = static_cast<std::size_t>(values.elems) * sizeof(float);
    for (std::size_t i = 0; i < nodes.size(); ++i) {
        device_.copy(pass_nodes_[i].get(), nodes[i].second, bytes);
    }
    const Bucket bucket{0, aligned(values.elems)};
    pass_route_->pack(bucket);
    run(pass_route_->collective(bucket, 0), "statistics");
    pass_route_->unpack(bucket);
    device_.copy(values.data, pass_nodes_.back().get(), bytes);
}

void Reducer::gather_updates(float* data, std::int64_t count) {
    if (comm_.size() > 1) {
        add_operation({.kind = Collective::Kind::all_gather, .data = data, .count = count}, -1);
    }
}

void Reducer::wait_on_stream(std::size_t index) {
    Step& step = steps_.back();
    StepEvents::Operation& events = step.events.operations[index];
    events.waited = device_.record();
    step.operations[index].request->wait_on_stream();
    if (!direct()) {
        device_.wait(
            from_host(Device::Stream::copy, staging_[index], step.operations[index].collective));
    }
    events.arrived = device_.record();
}

void Reducer::start_staged(std::size_t first) {
    const std::vector<Operation>& operations = steps_.back().operations;
    for (std::size_t i = first; i < operations.size() && !direct(); ++i) {
        device_.synchronize(operations[i].staged);
        start(i);
    }
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
    start_staged(0);  // the device is still computing while the first buckets arrive
    const std::size_t sums = step.operations.size();
    for (std::size_t i = 0; i < sums; ++i) {
        wait_on_stream(i);
        const int index = step.operations[i].bucket;
        if (i + 1 == sums || step.operations[i + 1].bucket != index) {  // its last collective
            const Bucket& bucket = buckets_[static_cast<std::size_t>(index)];
            route_of(bucket).unpack(bucket);
            arrived(bucket);  // which may add operations
        }
    }
    finish();
    start_staged(sums);
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
    // Nothing has run: these were not steps, and their requests cannot be waited for.
    step_ = number;
    for (auto step = steps_.begin() + before; step != steps_.end(); ++step) {
        for (Operation& operation : step->operations) {
            step->others.push_back(std::move(operation.request));
        }
        for (const auto& request : step->others) {
            if (request != nullptr) {  // null if it failed to start
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
        // First, what the rank itself computed: the request's wait is only for the other ranks.
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
