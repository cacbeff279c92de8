#include "comm/step_times.hpp"

namespace gyre::comm {

StepTimes measure(Device& device, const StepEvents& events) {
    StepTimes times;
    for (const StepEvents::Operation& operation : events.operations) {
        device.synchronize(operation.arrived);
        const double exposed = device.seconds_between(operation.waited, operation.arrived);
        times.exposed += exposed;
        (operation.gathers ? times.gathered : times.buckets)
            .push_back({.ready = device.seconds_between(events.begin, operation.ready),
                        .arrived = device.seconds_between(events.begin, operation.arrived),
                        .exposed = exposed});
    }
    return times;
}

}  // namespace gyre::comm
