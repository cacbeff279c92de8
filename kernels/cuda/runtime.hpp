// The thin interface between gyre's CUDA code and what it runs on: memory, streams, events.
//
// Everything in kernels/cuda/ is compiled twice: for a GPU, into namespace gyre::cuda, and, with
// GYRE_EMULATED defined, for the emulator of kernels/emulation/, into gyre::emulated. The two
// implementations of this header are kernels/cuda/runtime.cpp and kernels/emulation/runtime.cpp.
// Calls throw Error (internal) with expression, place, host and a remedy where one is known.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#if defined(GYRE_EMULATED)
#define SIMT_NAMESPACE emulated
#else
#define SIMT_NAMESPACE cuda
#endif

namespace gyre::SIMT_NAMESPACE {

class Stream;

// A point in a stream. Waiting for one that was never recorded returns at once.
class Event {
 public:
    // timed: milliseconds() will be asked for; where it is not, recording and waiting cost less.
    explicit Event(bool timed = true);
    ~Event();
    Event(const Event&) = delete;
    Event& operator=(const Event&) = delete;

    void synchronize() const;
    // Milliseconds between two timed events that have passed. Only the GPU's are of use.
    static float milliseconds(const Event& start, const Event& end);

 private:
    friend class Stream;
    friend class Graph;
    struct State;
    std::shared_ptr<State> state_;
};

// Work in order. Every call returns before the work is done; memory must stay until it is.
class Stream {
 public:
    Stream();
    ~Stream();
    Stream(const Stream&) = delete;
    Stream& operator=(const Stream&) = delete;

    void upload(void* device, const void* host, std::size_t bytes);
    void download(void* host, const void* device, std::size_t bytes);
    void copy(void* to, const void* from, std::size_t bytes);  // device to device
    void fill_zero(void* device, std::size_t bytes);
    void record(Event& event);
    // In a capture: every launch of the graph records the event, for the host to look at.
    void record_in_launches(Event& event);
    void wait(const Event& event);  // what follows starts after the event's last record so far
    void synchronize();

    // What libraries know the stream by: a cudaStream_t, or this object where it is emulated.
    void* handle();

    struct State;
    State& state() { return *state_; }

 private:
    std::unique_ptr<State> state_;
};

// Work of several streams, captured once and submitted as a whole any number of times.
class Graph {
 public:
    // Captures what `submit` asks of `stream`, and of the streams that wait for it meanwhile, for
    // which it must have waited in the end; none of it runs. Until then the host can neither wait
    // for the device nor allocate. Throws what went wrong first; the streams are usable then.
    Graph(Stream& stream, const std::function<void()>& submit);
    ~Graph();
    Graph(const Graph&) = delete;
    Graph& operator=(const Graph&) = delete;

    // After what the stream was asked for so far, and before what follows.
    void launch(Stream& stream);

    struct State;

 private:
    std::shared_ptr<State> state_;  // launches that have not run yet share it
};

// Device memory, aligned to 256 bytes, not initialised. Throws naming what was asked and is free.
void* allocate(std::size_t bytes);
void release(void* memory) noexcept;
// Host memory that transfers may use while the host goes on (page-locked).
void* allocate_pinned(std::size_t bytes);
void release_pinned(void* memory) noexcept;

// Dynamic shared memory of a launch.
struct SharedBytes {
    std::size_t count = 0;
};
// Blocks of a launch that run side by side, see each other's shared memory and have barriers of
// their own (sm_90); neighbours along x, a divisor of the grid's.
struct ClusterBlocks {
    unsigned count = 1;
};
// Shared memory that a block may have in all on sm_90 (sm_80: 163 KiB), and what without asking.
constexpr std::size_t kMostSharedBytes = 227 << 10;
constexpr std::size_t kSharedBytesUnasked = 48 << 10;

struct DeviceProperties {
    std::string name;
    int multiprocessors = 1;
    std::size_t shared_bytes = kSharedBytesUnasked;  // that a block may ask for
    std::string bus_id, uuid;
};
// Makes this device the current one of the calling thread. Throws where it cannot run gyre. share:
// an index beyond the devices there are counts on from the first.
DeviceProperties select_device(int index, bool share);

}  // namespace gyre::SIMT_NAMESPACE
