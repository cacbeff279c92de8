// A device: memory, copies, events and graphs on two streams. This is everything communication
// needs from a GPU or from the host; it knows nothing of layers.
//
// Code above this interface is the same on every device. Pointers are device pointers unless noted,
// and sizes are in bytes. Calls may be asynchronous; they run in order on the compute stream, which
// a backend's kernels also use. A device is used by one thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "base/data_type.hpp"

namespace gyre {

// Identifies a GPU, to tell apart those of different ranks. Empty strings: the host itself.
struct DeviceIdentity {
    std::string bus_id, uuid;
    bool emulated = false;
};

class Device {
 public:
    virtual ~Device() = default;
    virtual std::string description() const = 0;
    virtual DeviceIdentity device_identity() const { return {}; }
    // True if the host can access device pointers directly.
    virtual bool host_memory() const = 0;

    // Zeroed device memory; and page-locked host memory for asynchronous copies.
    virtual void* allocate(std::size_t bytes) = 0;
    virtual void release(void* memory) noexcept = 0;
    virtual void* allocate_pinned(std::size_t bytes) = 0;
    virtual void release_pinned(void* memory) noexcept = 0;

    // These two block the host until the copy is done.
    virtual void upload(void* device, const void* host, std::size_t bytes) = 0;
    virtual void download(void* host, const void* device, std::size_t bytes) = 0;
    virtual void copy(void* to, const void* from, std::size_t bytes) = 0;  // on the device
    virtual void fill_zero(void* device, std::size_t bytes) = 0;
    // Converts x to the 16-bit type (never float32), multiplied by *factor on the device unless
    // null; converts it back; and does both at once (y = x rounded to `type`).
    virtual void narrow(DataType type, std::int64_t elems, const float* x, std::uint16_t* y,
                        const float* factor = nullptr) = 0;
    virtual void widen(DataType type, std::int64_t elems, const std::uint16_t* x, float* y) = 0;
    virtual void round_to(DataType type, std::int64_t elems, const float* x, float* y) = 0;
    // y += x
    virtual void add(std::int64_t elems, const float* x, float* y) = 0;
    // Waits until both streams are idle.
    virtual void synchronize() = 0;

    // A point in a stream; the last kKeptEvents are kept. Calls made after wait(event) start on the
    // device after that point; synchronize(event) blocks the host until it is reached.
    using Event = std::int64_t;
    static constexpr std::int64_t kKeptEvents = 20480;
    virtual Event record() = 0;  // on the compute stream
    virtual void wait(Event event) = 0;
    virtual void synchronize(Event event) = 0;
    // Device time between two events, both of which have been reached.
    virtual double seconds_between(Event begin, Event end) = 0;

    // Calls between these two form a range of that name in GPU profilers (NVTX).
    virtual void push_range(const char* /*name*/) {}
    virtual void pop_range() {}

    // Asynchronous copies from and to pinned memory; each returns the event at which it is done. On
    // the copy stream they start after all earlier calls and run concurrently with later ones,
    // which must wait for the event before they write to the copied memory.
    enum class Stream { compute, copy };
    virtual Event download_async(Stream stream, void* host, const void* device,
                                 std::size_t bytes) = 0;
    virtual Event upload_async(Stream stream, void* device, const void* host,
                               std::size_t bytes) = 0;
    // Work that a library submits to the copy stream, in order with the copies there. submit
    // receives the native handle of the stream (a cudaStream_t; null if the device is the host).
    virtual Event submit_to_copy_stream(const std::function<void(void* stream)>& submit) = 0;

    // A graph of calls that the device executes as a whole: captured once with their arguments,
    // then launched any number of times. Calls that synchronise or allocate cannot be captured;
    // copies must have been waited for. The device must outlive its graphs.
    class Graph {
     public:
        virtual ~Graph() = default;
        virtual void launch() = 0;
    };
    virtual bool can_capture() const { return false; }
    // Runs none of the calls that `calls` makes. On failure throws the error, and no graph exists.
    // Events recorded inside refer to the latest launch, for as long as the graph exists.
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
