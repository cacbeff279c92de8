// Sums gradients over the ranks, bucket by bucket, while the backward pass still runs.
//
// The gradients of a net are in one buffer, in the order of the layers; the backward pass finishes
// them from the end. A bucket is a contiguous piece of that buffer, and its reduction starts as
// soon as everything in it is final, by the route that its plan gives it. Where the communicator
// cannot use the device's memory, what travels is copied to the host's during the backward pass,
// and reduced at the end of that.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "base/function_ref.hpp"
#include "comm/bucket_plan.hpp"
#include "comm/communicator.hpp"
#include "comm/gradient_route.hpp"
#include "comm/step_times.hpp"
#include "kernels/device/device.hpp"
#include "kernels/device/rank_sums.hpp"
#include "kernels/device/timeline.hpp"

namespace gyre::comm {

class Reducer final : public RankSums {
 public:
    using Times = StepTimes;
    // Steps, or launches of several, that may have begun and not been synchronized.
    static constexpr int kMostSteps = 3;

    // gradients: on the device, up to the end of the first bucket. factors: serves the buckets with
    // Route::factors, and outlives this. shards: for those with Route::fixed_order.
    Reducer(Communicator& comm, Device& device, std::vector<Bucket> buckets, float* gradients,
            GradientRoute* factors = nullptr, const ShardSums& shards = {});

    // Before the calls for a step.
    void begin_step();
    // All gradients at and after `begin` are final: starts the reduction of every complete bucket.
    void ready(std::int64_t begin);
    // Another collective of the step, in the device's memory, whose result the device's next calls
    // see. If not direct(), the host waits for the device's calls so far and for the other ranks;
    // not in a capture. part: its name in reports.
    void run(const Collective& collective, const char* part);
    // For operations within a pass, such as batch normalisation: in reports "statistics". As
    // collectives run in the order in which they were started, a sum waits for the buckets before
    // it. With shards, leaves are this rank's, and are added in the tree over those of all ranks.
    void sum(const LeafValues& values) override;
    // True if the communicator works in the device's memory.
    bool direct() const { return direct_; }
    // Calls arrived(bucket) for each bucket, in the order in which they became ready, as soon as
    // the device's next calls see its sum (of a bucket that is shared out, that of the own share);
    // all buckets must be ready. all_arrived() comes after the last; what both gather with
    // gather_updates() is there when finish_step() returns.
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

 private:
    using Staging = PinnedBuffer<std::byte>;
    struct Operation {
        Collective collective;     // in the device's memory
        int bucket;                // whose sum it is part of; -1: none's
        Device::Event staged = 0;  // if not direct()
        std::unique_ptr<Request> request = nullptr;
        Label label = {};  // where it is recorded
    };
    struct Step {
        StepEvents events;
        std::vector<Operation> operations;             // with these events; none in a graph
        std::size_t buckets = 0;                       // that are ready
        std::vector<std::unique_ptr<Request>> others;  // not complete when they were run
        int others_run = 0;
        bool launched = false;  // as part of a graph
        Timeline* timeline = nullptr;
        std::unique_ptr<Request>
            graph;  // the first one's of a launch, null where ranks do not meet
    };

    Step& add_step();
    GradientRoute& route_of(const Bucket& bucket) const {
        return *routes_[static_cast<std::size_t>(bucket.route)];
    }
    void add_operation(const Collective& collective, int bucket);
    // For operation `index` of the current step.
    void start(std::size_t index);
    void wait_on_stream(std::size_t index);
    // If not direct(): starts the operations from `first` on, each when it has been downloaded.
    void start_staged(std::size_t first);
    // Copy what this rank contributes from the device to the host, and the result back.
    Device::Event to_host(Device::Stream stream, Staging& staging, const Collective& collective);
    Device::Event from_host(Device::Stream stream, const Staging& staging,
                            const Collective& collective);
    // Adds up a rank's leaves as far as they are nodes of the tree: to leaf_nodes_, in their
    // places.
    void add_leaves(const LeafValues& values);
    // Adds up the nodes of all ranks.
    void sum_nodes(const LeafValues& values);
    void record(Timeline& timeline, const Step& step);
    static void record(Timeline& timeline, const Request& request, const Label& label,
                       std::optional<Device::Event> ready, double& free_from);

    Communicator& comm_;
    Device& device_;
    const std::vector<Bucket> buckets_;
    const bool direct_;
    std::vector<std::unique_ptr<GradientRoute>> own_routes_;
    std::array<GradientRoute*, 3> routes_{};  // by Route; as far as buckets have them
    // The route of sums within a pass, if ranks gather the nodes of a sum, and the buffers from
    // which it takes this rank's nodes, the last of which becomes the sum.
    const ShardSums shards_;
    std::vector<DeviceBuffer<float>> pass_nodes_;
    std::unique_ptr<GradientRoute> pass_route_;
    std::vector<std::pair<TreeNode, float*>> leaf_nodes_;
    // The host's memory if not direct(): of each operation of a step, and of what run() runs.
    std::vector<Staging> staging_;
    Staging others_staging_;
    std::vector<Step> steps_;  // not synchronized; the last is the current one
    std::int64_t step_ = -1;   // since the reducer was made
    bool capturing_ = false;
    Timeline* timeline_ = nullptr;
};

}  // namespace gyre::comm
