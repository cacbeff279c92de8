// The runtime of CUDA code, for its host: memory, streams, events, graphs.
//
// The emulator implements it, in namespace simt. A program that runs the same code on a GPU too
// implements it once more, in a namespace that it defines as SIMT_RUNTIME before it includes this.
// Calls throw gyre::Error (internal), a std::runtime_error that says what went wrong.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#if !defined(SIMT_RUNTIME)
#define SIMT_RUNTIME simt
#endif

namespace SIMT_RUNTIME {

class Stream;

// A point in a stream. Waiting for one that was never recorded returns at once.
class Event {
 public:
    // timed: milliseconds() is needed; otherwise recording and waiting are cheaper.
    explicit Event(bool timed = true);
    ~Event();
    Event(const Event&) = delete;
    Event& operator=(const Event&) = delete;

    void synchronize() const;
    // Milliseconds between two timed events that have been reached. Meaningful only on a GPU.
    static float milliseconds(const Event& start, const Event& end);

 private:
    friend class Stream;
    friend class Graph;
    struct State;
    std::shared_ptr<State> state_;
};

// Work in order. Calls return before the work is done; memory must stay valid until then.
class Stream {
 public:
    // urgent: blocks of this stream's kernels start before those of other streams; this also holds
    // in a graph that has captured them.
    explicit Stream(bool urgent = false);
    ~Stream();
    Stream(const Stream&) = delete;
    Stream& operator=(const Stream&) = delete;

    void upload(void* device, const void* host, std::size_t bytes);
    void download(void* host, const void* device, std::size_t bytes);
    void copy(void* to, const void* from, std::size_t bytes);  // device to device
    void fill_zero(void* device, std::size_t bytes);
    void record(Event& event);
    // During a capture: every launch of the graph records the event, for use by the host.
    void record_in_launches(Event& event);
    void wait(const Event& event);  // later work starts after the event's latest record so far
    void synchronize();

    // The handle for libraries: a cudaStream_t, or on the emulated GPU this object.
    void* handle();

    struct State;
    State& state() { return *state_; }

 private:
    std::unique_ptr<State> state_;
};

// Work of several streams, captured once and submitted as a whole any number of times.
class Graph {
 public:
    // Captures the work that `submit` gives to `stream` and to streams that wait for it meanwhile,
    // which it must have joined at the end; none of it runs. During the capture the host can
    // neither wait for the device nor allocate. Throws the first error; the streams remain usable.
    Graph(Stream& stream, const std::function<void()>& submit);
    ~Graph();
    Graph(const Graph&) = delete;
    Graph& operator=(const Graph&) = delete;

    // Runs after the stream's earlier work and before its later work.
    void launch(Stream& stream);

    struct State;

 private:
    std::shared_ptr<State> state_;  // shared with launches that have not run yet
};

// Device memory, aligned to 256 bytes, not initialised. Errors name the requested and free sizes.
void* allocate(std::size_t bytes);
void release(void* memory) noexcept;
// Page-locked host memory, for transfers concurrent with the host.
void* allocate_pinned(std::size_t bytes);
void release_pinned(void* memory) noexcept;

// Dynamic shared memory of a launch.
struct SharedBytes {
    std::size_t count = 0;
};
// Blocks of a launch that run concurrently, can access each other's shared memory and have their
// own barriers (sm_90). Adjacent along x; the count divides the grid's.
struct ClusterBlocks {
    unsigned count = 1;
};
// Shared memory of a block on sm_90 (sm_80: 163 KiB): in total, without a request, and reserved by
// the system.
constexpr std::size_t kMostSharedBytes = 227 << 10;
constexpr std::size_t kSharedBytesUnasked = 48 << 10;
constexpr std::size_t kSystemSharedBytes = 1 << 10;

struct DeviceProperties {
    std::string name;
    int multiprocessors = 1;
    // The largest request of a block, less the system's part, which only some GPUs count against
    // it.
    std::size_t shared_bytes = kSharedBytesUnasked;
    std::string bus_id, uuid;
};
// Makes this device the calling thread's current one. Throws if it cannot run gyre. share: an index
// beyond the last device wraps around.
DeviceProperties select_device(int index, bool share);

}  // namespace SIMT_RUNTIME
