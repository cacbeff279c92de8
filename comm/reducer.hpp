// Sums gradients over the ranks, bucket by bucket, while the backward pass still runs.
//
// The gradients of a net lie in one buffer, in the order of the layers; the backward pass finishes
// them from the end. A bucket is a contiguous piece of that buffer, and its reduction starts as
// soon as everything in it is final.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "comm/communicator.hpp"
#include "kernels/backend.hpp"

namespace gyre {

// Elements [begin, end) of the gradient buffer.
struct Bucket {
    std::int64_t begin, end;
    std::int64_t elems() const { return end - begin; }
    std::int64_t bytes() const { return elems() * std::int64_t{sizeof(float)}; }
};

// Divides [0, total_elems) into buckets, the one that is final first at the front. `tensor_begins`
// are the offsets at which parameters begin, ascending from 0; the last extends to the end. A
// bucket is closed once it has bucket_bytes or more, so it holds whole tensors.
// bucket_bytes = nullopt ("auto"): an eighth of the gradients, between 16 KiB (below which a
// message costs its latency, whatever its size) and 4 MiB (beyond which a bucket gains nothing).
std::vector<Bucket> plan_buckets(const std::vector<std::int64_t>& tensor_begins,
                                 std::int64_t total_elems,
                                 std::optional<std::int64_t> bucket_bytes);

// Where the communicator cannot use the device's memory, buckets travel through host memory: copied
// beside the backward pass as they become final, reduced, and copied back.
class Reducer {
 public:
    // gradients: the device's.
    Reducer(Communicator& comm, Backend& backend, std::vector<Bucket> buckets, float* gradients);

    // All gradients at and after `begin` are final: starts the reduction of every complete bucket.
    void ready(std::int64_t begin);
    // Waits for the reductions of this step; all buckets must be ready. Returns the seconds spent
    // waiting, that is the communication that was not hidden behind computation.
    double wait();

    const std::vector<Bucket>& buckets() const { return buckets_; }

 private:
    bool staged() const { return staging_.get() != nullptr; }
    void start(const Bucket& bucket, float* gradients);

    Communicator& comm_;
    Backend& backend_;
    std::vector<Bucket> buckets_;
    float* gradients_;
    HostBuffer<float> staging_;  // as large as the gradients, where they are staged
    std::size_t ready_ = 0;      // buckets of this step that are final
    std::int64_t step_ = 0;      // since the reducer was made
    std::vector<Backend::Transfer> transfers_;
    std::vector<std::unique_ptr<Request>> under_way_;
};

}  // namespace gyre
