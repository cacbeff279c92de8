// A device: memory, copies, events and graphs on two streams. All that communication needs of a
// GPU, or of the host itself; it knows no layer.
//
// Everything above this interface is the same on every device. Pointers are device pointers unless
// said otherwise, sizes are in bytes. Calls may be asynchronous: they are in order on the compute
// stream, where a backend's kernels run too. A device is used by one thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "kernels/base/data_type.hpp"

namespace gyre {

// Which GPU a device is, for telling apart those of the ranks. Empty: the host itself.
struct DeviceIdentity {
    std::string bus_id, uuid;
    bool emulated = false;
};

class Device {
 public:
    virtual ~Device() = default;
    virtual std::string description() const = 0;
    virtual DeviceIdentity device_identity() const { return {}; }
    // Whether the host may use device pointers as its own.
    virtual bool host_memory() const = 0;

    // Memory of the device, zeroed; and host memory for asynchronous copies (page-locked).
    virtual void* allocate(std::size_t bytes) = 0;
    virtual void release(void* memory) noexcept = 0;
    virtual void* allocate_pinned(std::size_t bytes) = 0;
    virtual void release_pinned(void* memory) noexcept = 0;

    // The host waits for these two.
    virtual void upload(void* device, const void* host, std::size_t bytes) = 0;
    virtual void download(void* host, const void* device, std::size_t bytes) = 0;
    virtual void copy(void* to, const void* from, std::size_t bytes) = 0;  // on the device
    virtual void fill_zero(void* device, std::size_t bytes) = 0;
    // y = x in a 16-bit type (float32 is none), times *factor on the device where not null; back;
    // and both ways in one.
    virtual void narrow(DataType type, std::int64_t elems, const float* x, std::uint16_t* y,
                        const float* factor = nullptr) = 0;
    virtual void widen(DataType type, std::int64_t elems, const std::uint16_t* x, float* y) = 0;
    virtual void round_to(DataType type, std::int64_t elems, const float* x, float* y) = 0;
    // y += x
    virtual void add(std::int64_t elems, const float* x, float* y) = 0;
    // Until all of both streams is done.
    virtual void synchronize() = 0;

    // A point in a stream, of the last kKeptEvents. What is called after wait(event) starts on the
    // device after that point; synchronize(event) lets the host wait for it.
    using Event = std::int64_t;
    static constexpr std::int64_t kKeptEvents = 16384;
    virtual Event record() = 0;  // on the compute stream
    virtual void wait(Event event) = 0;
    virtual void synchronize(Event event) = 0;
    // The device's time from one event to another, both passed.
    virtual double seconds_between(Event begin, Event end) = 0;

    // What the host asks for between these is a range of that name in a GPU's profiler (NVTX).
    virtual void push_range(const char* /*name*/) {}
    virtual void pop_range() {}

    // Copies from and to pinned memory that the host need not wait for, done at the event that is
    // returned. On the copy stream they start after the calls so far and run beside those that
    // follow, which must not write to what is copied before they have waited for the event.
    enum class Stream { compute, copy };
    virtual Event download_async(Stream stream, void* host, const void* device,
                                 std::size_t bytes) = 0;
    virtual Event upload_async(Stream stream, void* device, const void* host,
                               std::size_t bytes) = 0;
    // Work that a library submits to the copy stream, of which it is given the native handle (a
    // cudaStream_t; null where the device is the host), in the order of the copies there.
    virtual Event submit_to_copy_stream(const std::function<void(void* stream)>& submit) = 0;

    // Calls as a graph, which the device is asked for as a whole: captured once, with their
    // arguments, and then launched any number of times. Calls that synchronise or allocate cannot
    // be captured; copies must have been waited for. The device outlives its graphs.
    class Graph {
     public:
        virtual ~Graph() = default;
        virtual void launch() = 0;
    };
    virtual bool can_capture() const { return false; }
    // Runs nothing of what `calls` asks for. Throws what went wrong; then there is no graph. Events
    // recorded in it are those of the latest launch, for as long as there is the graph.
    virtual std::unique_ptr<Graph> capture(const std::function<void()>& /*calls*/) {
        return nullptr;
    }
};

// Owns memory for `elems` values of T. The device must outlive it.
template <typename T, void* (Device::*kAllocate)(std::size_t),
          void (Device::*kRelease)(void*) noexcept>
class OwnedMemory {
 public:
    OwnedMemory() = default;
    OwnedMemory(Device& device, std::int64_t elems)
        : memory_(static_cast<T*>((device.*kAllocate)(static_cast<std::size_t>(elems) * sizeof(T))),
                  Release{&device}),
          elems_(elems) {}

    T* get() const { return memory_.get(); }
    std::int64_t elems() const { return elems_; }
    std::size_t bytes() const { return static_cast<std::size_t>(elems_) * sizeof(T); }

 private:
    struct Release {
        Device* device;
        void operator()(T* memory) const noexcept { (device->*kRelease)(memory); }
    };
    std::unique_ptr<T, Release> memory_{nullptr, Release{nullptr}};
    std::int64_t elems_ = 0;
};
// Zeroed memory of the device.
template <typename T>
using DeviceBuffer = OwnedMemory<T, &Device::allocate, &Device::release>;
// Host memory for asynchronous copies.
template <typename T>
using PinnedBuffer = OwnedMemory<T, &Device::allocate_pinned, &Device::release_pinned>;

}  // namespace gyre
