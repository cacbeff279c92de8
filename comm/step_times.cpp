#include "comm/step_times.hpp"

#include <cstddef>

namespace gyre::comm {

StepTimes measure(Device& device, const StepEvents& events) {
    StepTimes times;
    for (const StepEvents::Operation& operation : events.operations) {
        device.synchronize(operation.arrived);
        const double exposed = device.seconds_between(operation.waited, operation.arrived);
        times.exposed += exposed;
        if (operation.bucket < 0) {
            continue;
        }
        const auto bucket = static_cast<std::size_t>(operation.bucket);
        if (bucket == times.buckets.size()) {  // its first collective
            times.buckets.push_back(
                {.ready = device.seconds_between(events.begin, operation.ready)});
        }
        times.buckets[bucket].arrived = device.seconds_between(events.begin, operation.arrived);
        times.buckets[bucket].exposed += exposed;
    }
    for (const StepEvents::Statistics& sum : events.statistics) {
        device.synchronize(sum.arrived);
        times.statistics += device.seconds_between(sum.waited, sum.arrived);
    }
    times.exposed += times.statistics;
    return times;
}

}  // namespace gyre::comm
