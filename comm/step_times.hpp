// The cost of a step's communication, by events of the device.
#pragma once

#include <vector>

#include "kernels/device/device.hpp"

namespace gyre::comm {

// Recorded while a step is submitted.
struct StepEvents {
    struct Operation {
        int bucket = -1;            // whose sum it is part of; -1: none's
        Device::Event ready = 0;    // its data is final
        Device::Event waited = 0;   // the device begins to wait for it
        Device::Event arrived = 0;  // and has its result
    };
    // A sum within a pass, which the device waits for at once.
    struct Statistics {
        Device::Event waited = 0, arrived = 0;
    };
    Device::Event begin = 0;
    std::vector<Operation> operations;
    std::vector<Statistics> statistics;
};

// In seconds of the device's time.
struct StepTimes {
    double exposed = 0.0;     // it waited for collectives, that is they were not hidden
    double statistics = 0.0;  // of that, for sums within passes
    struct Of {
        double ready = 0.0, arrived = 0.0;  // since the begin of the step
        double exposed = 0.0;
    };
    std::vector<Of> buckets;  // empty if there is one rank
};

// The host waits until the device has passed all events.
StepTimes measure(Device& device, const StepEvents& events);

}  // namespace gyre::comm
