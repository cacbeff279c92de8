// Sums gradients over the ranks, bucket by bucket, while the backward pass still runs.
//
// The gradients of a net lie in one buffer, in the order of the layers; the backward pass finishes
// them from the end. A bucket is a contiguous piece of that buffer, and its reduction starts as
// soon as everything in it is final. Where the communicator cannot use the device's memory, it is
// copied to the host's during the backward pass, and reduced at the end of that.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "base/function_ref.hpp"
#include "comm/bucket_plan.hpp"
#include "comm/communicator.hpp"
#include "comm/gradient_transport.hpp"
#include "comm/step_times.hpp"
#include "kernels/device/device.hpp"
#include "kernels/device/timeline.hpp"

namespace gyre::comm {

class Reducer {
 public:
    using Times = StepTimes;
    // Steps, or launches of several, that may have begun and not been synchronized.
    static constexpr int kMostSteps = 3;

    // gradients, type, exact_from, order: GradientTransport's. Buckets may be shared out only where
    // the communicator works in the device's memory.
    Reducer(Communicator& comm, Device& device, std::vector<Bucket> buckets, float* gradients,
            DataType type = DataType::float32, std::int64_t exact_from = 0,
            SumOrder order = SumOrder::library);

    // Before the calls for a step.
    void begin_step();
    // All gradients at and after `begin` are final: starts the reduction of every complete bucket.
    void ready(std::int64_t begin);
    // Gradients that are not reduced: gathers `data`, [ranks][count], from which then() computes
    // those of `range`, the sum over the ranks, in finish_step(). For several gatherings one after
    // another the last has then(). Only where direct().
    void all_gather(float* data, std::int64_t count, const Bucket& range,
                    std::function<void()> then);
    // Another collective of the step, whose result the device's next calls see. part: its name in
    // reports.
    void run(Collective collective, const char* part);
    // True if the communicator works in the device's memory.
    bool direct() const { return transport_.direct(); }
    // Calls arrived(bucket) for each bucket and each gathered range, in the order in which they
    // became ready, as soon as the device's next calls see its sum (of a bucket that is shared out,
    // that of the own share); all buckets must be ready. all_arrived() comes after the last; what
    // both gather with gather_updates() is there when finish_step() returns.
    void finish_step(FunctionRef<void(const Bucket&)> arrived,
                     FunctionRef<void()> all_arrived = {});
    // Within finish_step(): data, [ranks][count], of which this rank has computed its own row.
    void gather_updates(float* data, std::int64_t count);

    struct Captured {
        std::unique_ptr<Device::Graph> graph;
        std::vector<StepEvents> steps;
        std::size_t collectives = 0;  // of all of them
    };
    // Device::capture() for the calls of whole steps, alike on all ranks. Only where direct().
    Captured capture(const std::function<void()>& calls);
    // In place of a step's calls; a graph is launched again only when its last step was
    // synchronized.
    void launch(const Captured& captured);

    // Steps that begin from now on are recorded there; null: not.
    void trace(Timeline* timeline) { timeline_ = timeline; }

    // The host waits until the oldest step for which it has not is complete. Steps may begin before
    // that of earlier ones.
    Times synchronize_step();

    Communicator& communicator() const { return comm_; }
    const std::vector<Bucket>& buckets() const { return buckets_; }
    DataType type() const { return transport_.type(); }

 private:
    struct Operation {
        Bucket bucket;
        Device::Event packed = 0;  // where not direct()
        std::unique_ptr<Request> request = nullptr;
        Label label = {};                 // where it is recorded
        std::function<void()> then = {};  // of a gathering
    };
    struct Step {
        StepEvents events;
        std::vector<Operation> operations;             // with these events; none in a graph
        std::size_t buckets = 0;                       // among them
        std::vector<std::unique_ptr<Request>> others;  // not complete when they were run
        int others_run = 0;
        bool launched = false;  // as part of a graph
        Timeline* timeline = nullptr;
        std::unique_ptr<Request>
            graph;  // the first one's of a launch, null where ranks do not meet
    };

    Step& add_step();
    Operation& add_operation(const Bucket& bucket, bool gathers);
    // For operation `index` of the current step.
    void start(std::size_t index, Collective collective);
    void wait_on_stream(std::size_t index);
    void record(Timeline& timeline, const Step& step);
    static void record(Timeline& timeline, const Request& request, const Label& label,
                       std::optional<Device::Event> ready, double& free_from);

    Communicator& comm_;
    Device& device_;
    const std::vector<Bucket> buckets_;
    GradientTransport transport_;
    std::vector<Step> steps_;  // not synchronized; the last is the current one
    std::int64_t step_ = -1;   // since the reducer was made
    bool capturing_ = false;
    Timeline* timeline_ = nullptr;
};

}  // namespace gyre::comm
