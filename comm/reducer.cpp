#include "comm/reducer.hpp"

#include <algorithm>
#include <exception>

namespace gyre::comm {

namespace {
// A device keeps the events of a few steps only (Device::seconds_between).
constexpr std::int64_t kMostBuckets = 1024;

// What the device was asked for up to an event.
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

std::vector<Bucket> plan_buckets(const std::vector<std::int64_t>& tensor_begins,
                                 std::int64_t total_elems, std::int64_t bucket_bytes,
                                 std::optional<std::int64_t> apart,
                                 const std::vector<Bucket>& gathered) {
    constexpr std::int64_t kGrainElems = 16, kGrainBytes = kGrainElems * sizeof(float);
    const std::int64_t total_bytes = total_elems * std::int64_t{sizeof(float)};
    const std::int64_t least = std::max(total_bytes / kMostBuckets, bucket_bytes);
    const std::int64_t part_elems = std::max(kGrainElems, least / kGrainBytes * kGrainElems);
    std::vector<Bucket> buckets;
    std::int64_t end = total_elems;
    if (apart && *apart < total_elems) {
        buckets.push_back({*apart, total_elems});
        end = *apart;
    }
    auto hole = gathered.rbegin();
    for (auto begin = tensor_begins.rbegin(); begin != tensor_begins.rend(); ++begin) {
        if (hole != gathered.rend() && *begin == hole->begin) {
            if (end > hole->end) {
                buckets.push_back({hole->end, end});
            }
            end = *begin;
            ++hole;
            continue;
        }
        const bool closed = *begin == 0 || (hole != gathered.rend() && *begin == hole->end);
        if (Bucket{*begin, end}.bytes() < least && !closed) {
            continue;
        }
        // The last part is what remains, up to twice a part.
        while (end - *begin > 2 * part_elems) {
            const std::int64_t part =
                std::max(*begin, (end - part_elems + kGrainElems - 1) / kGrainElems * kGrainElems);
            buckets.push_back({part, end});
            end = part;
        }
        if (end > *begin) {
            buckets.push_back({*begin, end});
            end = *begin;
        }
    }
    return buckets;
}

std::int64_t auto_bucket_bytes(std::int64_t total_elems, bool on_gpu) {
    const std::int64_t total_bytes = total_elems * std::int64_t{sizeof(float)};
    if (!on_gpu) {
        return std::clamp<std::int64_t>(total_bytes / 16, 16 << 10, 4 << 20);
    }
    return total_bytes <= 1 << 20 ? total_bytes
                                  : std::clamp<std::int64_t>(total_bytes / 4, 16 << 20, 32 << 20);
}

Reducer::Reducer(Communicator& comm, Device& device, std::vector<Bucket> buckets, float* gradients,
                 DataType type, std::int64_t exact_from)
    : comm_(comm),
      device_(device),
      buckets_(std::move(buckets)),
      gradients_(gradients),
      type_(type),
      exact_from_(exact_from) {
    if (comm.size() == 1) {
        return;
    }
    if (type_ != DataType::float32) {
        narrow_ = {device, buckets_.front().end};
    }
    if (!comm.use_device(device)) {
        staging_ = {device, buckets_.front().end};
        return;
    }
    const auto elems = static_cast<std::size_t>(buckets_.front().end);
    registered_[0] = comm.register_buffer(gradients_, elems * sizeof(float));
    if (narrow_.get() != nullptr) {
        registered_[1] = comm.register_buffer(narrow_.get(), narrow_.bytes());
    }
}

void* Reducer::travelling(const Bucket& bucket) const {
    if (narrow(bucket)) {
        return narrow_.get() + bucket.begin;
    }
    return gradients_ + bucket.begin;
}

void Reducer::begin_step() {
    ++step_;
    steps_.emplace_back();
    if (comm_.size() > 1) {
        steps_.back().begin = device_.record();
        steps_.back().flights.reserve(buckets_.size());
    }
}

void Reducer::start(Flight& flight, void* data) {
    const int index = static_cast<int>(&flight - steps_.back().flights.data());
    flight.request = comm_.start({.kind = Collective::Kind::all_reduce,
                                  .data = data,
                                  .count = flight.bucket.elems(),
                                  .type = narrow(flight.bucket) ? type_ : DataType::float32,
                                  .origin = {step_, "bucket", index}});
}

void Reducer::all_gather(float* data, std::int64_t count, const Bucket& range,
                         std::function<void()> then) {
    std::vector<Flight>& flights = steps_.back().flights;
    Flight& flight = flights.emplace_back();
    flight.bucket = range;
    flight.gathers = true;
    flight.then = std::move(then);
    flight.ready = device_.record();
    flight.request =
        comm_.start({.kind = Collective::Kind::all_gather,
                     .data = data,
                     .count = count,
                     .origin = {step_, "bucket", static_cast<int>(flights.size()) - 1}});
}

void Reducer::ready(std::int64_t begin) {
    if (comm_.size() == 1) {
        return;
    }
    Step& step = steps_.back();
    for (; step.buckets < buckets_.size() && buckets_[step.buckets].begin >= begin;
         ++step.buckets) {
        const Bucket& bucket = buckets_[step.buckets];
        Flight& flight = step.flights.emplace_back();
        flight.bucket = bucket;
        flight.ready = device_.record();
        if (narrow(bucket)) {
            device_.narrow(type_, bucket.elems(), gradients_ + bucket.begin,
                           narrow_.get() + bucket.begin);
        }
        if (direct()) {
            start(flight, travelling(bucket));
        } else {
            flight.staged =
                device_.download_async(Device::Stream::copy, staging_.get() + bucket.begin,
                                       travelling(bucket), bytes(bucket));
        }
    }
}

void Reducer::finish_step(const std::function<void(const Bucket&)>& arrived) {
    if (comm_.size() == 1) {
        arrived({0, buckets_.front().end});
        return;
    }
    std::vector<Flight>& flights = steps_.back().flights;
    if (!direct()) {
        // The device is still computing while the first buckets arrive.
        for (Flight& flight : flights) {
            device_.synchronize(flight.staged);
            start(flight, staging_.get() + flight.bucket.begin);
        }
    }
    for (Flight& flight : flights) {
        const Bucket& bucket = flight.bucket;
        flight.waited = device_.record();
        flight.request->wait_on_stream();
        if (!direct()) {
            device_.wait(device_.upload_async(Device::Stream::copy, travelling(bucket),
                                              staging_.get() + bucket.begin, bytes(bucket)));
        }
        flight.arrived = device_.record();
        if (!flight.gathers) {
            if (narrow(bucket)) {
                device_.widen(type_, bucket.elems(), narrow_.get() + bucket.begin,
                              gradients_ + bucket.begin);
            }
            arrived(bucket);
        } else if (flight.then) {
            flight.then();
            arrived(bucket);
        }
    }
}

Reducer::Captured Reducer::capture(const std::function<void()>& calls) {
    const std::size_t steps = steps_.size();
    const std::int64_t number = step_;
    Captured captured;
    std::exception_ptr failure;
    try {
        captured.graph = device_.capture(calls);
    } catch (...) {
        failure = std::current_exception();
    }
    // Nothing has run: this was no step, and its requests cannot be waited for.
    step_ = number;
    if (steps_.size() > steps) {
        captured.step = std::move(steps_.back());
        steps_.pop_back();
        for (Flight& flight : captured.step.flights) {
            if (flight.request != nullptr) {
                flight.request->abandon();
                flight.request = nullptr;
            }
        }
    }
    if (failure != nullptr) {
        std::rethrow_exception(failure);
    }
    return captured;
}

void Reducer::launch(const Captured& captured) {
    ++step_;
    captured.graph->launch();
    Step& step = steps_.emplace_back();
    step.begin = captured.step.begin;
    for (const Flight& flight : captured.step.flights) {
        step.flights.push_back({flight.bucket, nullptr, flight.gathers, nullptr, flight.staged,
                                flight.ready, flight.waited, flight.arrived});
    }
    if (comm_.size() > 1) {
        step.graph = comm_.track(
            std::make_unique<Passed>(device_),
            {.name = "graph with " + std::to_string(step.flights.size()) + " reductions",
             .bytes = buckets_.front().end * std::int64_t{sizeof(float)},
             .origin = {step_, "bucket", 0}});
        step.graph->wait_on_stream();
    }
}

Reducer::Times Reducer::synchronize_step() {
    const Step step = std::move(steps_.front());
    steps_.pop_front();
    Times times;
    if (step.graph != nullptr) {
        step.graph->wait();  // before that, its events may still be those of an earlier launch
    }
    for (const Flight& flight : step.flights) {
        if (flight.request != nullptr) {
            // First, what the rank itself computed: the request's wait is for the other ranks
            // alone.
            device_.synchronize(flight.ready);
            flight.request->wait();
        }
        device_.synchronize(flight.arrived);  // which the device may not have passed yet
        const auto since_begin = [&](Device::Event event) {
            return device_.seconds_between(step.begin, event);
        };
        const double exposed = device_.seconds_between(flight.waited, flight.arrived);
        times.exposed += exposed;
        (flight.gathers ? times.gathered : times.buckets)
            .push_back({since_begin(flight.ready), since_begin(flight.arrived), exposed});
    }
    return times;
}

}  // namespace gyre::comm
