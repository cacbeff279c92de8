// Sums gradients over the ranks, bucket by bucket, while the backward pass still runs.
//
// The gradients of a net lie in one buffer, in the order of the layers; the backward pass finishes
// them from the end. A bucket is a contiguous piece of that buffer, and its reduction starts as
// soon as everything in it is final.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "comm/communicator.hpp"
#include "kernels/device/device.hpp"

namespace gyre::comm {

// Elements [begin, end) of the gradient buffer.
struct Bucket {
    std::int64_t begin, end;
    std::int64_t elems() const { return end - begin; }
    std::int64_t bytes() const { return elems() * std::int64_t{sizeof(float)}; }
};

// Divides [0, total_elems) into buckets, the one that is final first at the front. `tensor_begins`
// are the offsets at which parameters begin, ascending from 0; the last extends to the end.
// Neighbouring tensors share a bucket until it has bucket_bytes; a tensor of more than twice as
// much is split, at multiples of 16 elements, so that one part is on its way while the next is
// added up or updated. What lies at and after `apart` (nullopt: nothing) has a bucket of its own;
// `gathered`, ascending ranges of whole tensors, have none.
std::vector<Bucket> plan_buckets(const std::vector<std::int64_t>& tensor_begins,
                                 std::int64_t total_elems, std::int64_t bucket_bytes,
                                 std::optional<std::int64_t> apart = std::nullopt,
                                 const std::vector<Bucket>& gathered = {});
// bucket_bytes for --bucket-kib auto: a sixteenth of the gradients, between 16 KiB (below which a
// message costs its latency, whatever its size) and 4 MiB (beyond which a bucket gains nothing).
// on_gpu: they are reduced in a GPU's memory, where a reduction and what goes with it cost some 10
// us and links are a hundred times faster: one bucket up to 1 MiB in all, then a quarter of the
// gradients, between 16 and 32 MiB.
std::int64_t auto_bucket_bytes(std::int64_t total_elems, bool on_gpu);

// Where the communicator cannot use the device's memory, buckets travel through host memory: copied
// during the backward pass as they become final, reduced, and copied back.
class Reducer {
    struct Flight {
        Bucket bucket{};
        std::unique_ptr<Request> request;  // null in a graph
        bool gathers = false;
        std::function<void()> then;
        Device::Event staged = 0, ready = 0, waited = 0, arrived = 0;
    };
    struct Step {
        Device::Event begin = 0;
        std::vector<Flight> flights;     // of what is ready
        std::size_t buckets = 0;         // among them
        std::unique_ptr<Request> graph;  // null without
    };

 public:
    // gradients: the device's. With another type than float32, gradients travel in it, except for
    // those at and after `exact_from`, whose buckets must begin there.
    Reducer(Communicator& comm, Device& device, std::vector<Bucket> buckets, float* gradients,
            DataType type = DataType::float32, std::int64_t exact_from = 0);

    // Before the calls for a step.
    void begin_step();
    // All gradients at and after `begin` are final: starts the reduction of every complete bucket.
    void ready(std::int64_t begin);
    // Gradients that are not reduced: gathers `data`, [ranks][count], from which then() computes
    // those of `range`, the sum over the ranks, in finish_step(). For several gatherings one after
    // another the last has then(). Only where direct().
    void all_gather(float* data, std::int64_t count, const Bucket& range,
                    std::function<void()> then);
    // Whether the communicator works on the device's memory.
    bool direct() const { return staging_.get() == nullptr; }
    // Calls arrived(bucket) for each bucket and each gathered range, in the order in which they
    // became ready, as soon as the device's next calls see its sum; all buckets must be ready.
    void finish_step(const std::function<void(const Bucket&)>& arrived);

    struct Captured {
        std::unique_ptr<Device::Graph> graph;
        Step step;  // its events
    };
    // Device::capture() for the calls of a whole step, alike on all ranks. Only where direct().
    Captured capture(const std::function<void()>& calls);
    // In place of a step's calls; a graph is launched again only when its last step was
    // synchronized.
    void launch(const Captured& captured);

    // What the communication of a step cost, in seconds of the device's time.
    struct Times {
        double exposed = 0.0;  // it waited for reductions, that is they were not hidden
        struct Of {
            double ready, arrived;  // since the begin of the step
            double exposed;
        };
        std::vector<Of> buckets;   // empty where there is one rank
        std::vector<Of> gathered;  // each operation
    };
    // The host waits until the oldest step for which it has not is complete. Steps may begin before
    // that of earlier ones.
    Times synchronize_step();

    Communicator& communicator() const { return comm_; }
    const std::vector<Bucket>& buckets() const { return buckets_; }
    DataType type() const { return type_; }

 private:
    bool narrow(const Bucket& bucket) const {
        return type_ != DataType::float32 && bucket.begin < exact_from_;
    }
    std::size_t bytes(const Bucket& bucket) const {
        return static_cast<std::size_t>(bucket.elems()) *
               bytes_of(narrow(bucket) ? type_ : DataType::float32);
    }
    // What travels, on the device.
    void* travelling(const Bucket& bucket) const;
    void start(Flight& flight, void* data);

    Communicator& comm_;
    Device& device_;
    std::vector<Bucket> buckets_;
    float* gradients_;
    const DataType type_;
    const std::int64_t exact_from_;
    DeviceBuffer<std::uint16_t> narrow_;   // [gradients], where they travel in 16 bits
    std::shared_ptr<void> registered_[2];  // gradients_ and narrow_
    PinnedBuffer<float> staging_;  // [gradients], where they travel through the host's memory
    std::deque<Step> steps_;       // not synchronized; the last is the current one
    std::int64_t step_ = -1;       // since the reducer was made
};

}  // namespace gyre::comm
