// The way of a bucket of gradients on the device to the communicator and back: in 16 bits where
// that is asked for, and through the host's memory where the communicator cannot use the device's.
#pragma once

#include <cstdint>
#include <memory>

#include "comm/bucket_plan.hpp"
#include "comm/communicator.hpp"
#include "kernels/device/device.hpp"

namespace gyre::comm {

// The order in which the ranks' gradients are added: the library's own; or a binary tree
// (neighbours first, then pairs, and so on) on each rank, which gathers all gradients. Its cost:
// (n-1) gradients arrive at a rank instead of 2 (n-1)/n, and there is memory for n.
enum class SumOrder { library, tree };

class GradientTransport {
 public:
    // Called by all ranks. gradients: [elems], the device's. With another type than float32,
    // gradients travel in it, except for those at and after `exact_from`, whose buckets begin
    // there. A tree is for float32, a power of two of ranks, and buckets that are not shared out.
    GradientTransport(Communicator& comm, Device& device, float* gradients, std::int64_t elems,
                      DataType type, std::int64_t exact_from, SumOrder order = SumOrder::library);

    // True if the communicator works in the device's memory.
    bool direct() const { return staging_.get() == nullptr; }
    DataType type() const { return type_; }

    // In this order. First, when the bucket is final: the event after which its values lie where
    // reduction() works. Where direct() that is the device's affair, and there is none (0).
    Device::Event pack(const Bucket& bucket);
    Collective reduction(const Bucket& bucket) const;
    // When that is complete for the device: its memory has the sums; and gradients() has, of a
    // bucket that is shared out those of the own share.
    void receive(const Bucket& bucket);
    void unpack(const Bucket& bucket);

 private:
    bool narrow(const Bucket& bucket) const {
        return type_ != DataType::float32 && bucket.begin < exact_from_;
    }
    void* on_device(const Bucket& bucket) const;
    void* on_host(const Bucket& bucket) const { return staging_.get() + rows() * bucket.begin; }
    // Rows of a bucket in the memory that is sent.
    std::int64_t rows() const { return order_ == SumOrder::tree ? ranks_ : 1; }
    void add_tree(const Bucket& bucket);

    Device& device_;
    const int rank_, ranks_;
    const SumOrder order_;
    float* const gradients_;
    const DataType type_;
    const std::int64_t exact_from_;
    DeviceBuffer<std::uint16_t> narrow_;  // [elems], where they travel in 16 bits
    DeviceBuffer<float> gathered_;        // of each bucket [ranks][elems], for a tree
    PinnedBuffer<float> staging_;  // [rows()][elems], where they travel through the host's memory
};

}  // namespace gyre::comm
