// Memory, streams and events of the emulated GPU.
//
// Streams are lazy: work is queued and only runs when it is waited for. A stream that forgot to
// wait for another therefore reads stale data every time, instead of occasionally.
#include "kernels/emulation/runtime.hpp"

#include <fmt/format.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <new>
#include <optional>
#include <thread>
#include <vector>

#include "base/error.hpp"
#include "base/host_name.hpp"
#include "kernels/emulation/emulator.hpp"
#include "kernels/emulation/sanitizer.hpp"

namespace simt {

namespace {

std::int64_t submissions = 0;
std::int64_t copies = 0;
int multiprocessors = 4;
Graph::State* capture = nullptr;  // the capture in progress

}  // namespace

// The event's latest record. Waiting streams keep the state of that moment.
struct Event::State {
    struct Record {
        Stream::State* stream = nullptr;
        bool passed = false;
        // If recorded in a capture: the operation that recorded it.
        std::weak_ptr<Graph::State> graph;
        std::size_t operation = 0;
        std::vector<std::size_t> after;
        bool captured = false;
    };
    explicit State(bool timed_) : timed(timed_) {}
    const bool timed;
    std::shared_ptr<Record> record;
};

struct Stream::State {
    std::deque<std::function<void()>> queue;
    bool captured = false;
    std::size_t number = 0;  // index of the stream in the capture

    void submit(std::function<void()> work);
    void run_one() {
        const auto work = std::move(queue.front());
        queue.pop_front();
        try {
            work();
        } catch (...) {
            queue.clear();  // as after an error on a GPU; the host's buffers may soon be gone
            throw;
        }
    }
    void run_until(const Event::State::Record& record) {
        while (!record.passed && !queue.empty()) {
            run_one();
        }
    }
    void run_all() {
        while (!queue.empty()) {
            run_one();
        }
    }
};

struct Graph::State : std::enable_shared_from_this<Graph::State> {
    struct Operation {
        std::size_t stream = 0;
        std::function<void()> work;           // or, if empty, one of the following:
        std::optional<std::size_t> wait;      // waits for the record made by this operation
        std::shared_ptr<Event::State> event;  // a record, of the host's event or null
    };
    std::vector<Operation> operations;
    struct Captured {
        Stream::State* state;
        std::vector<std::size_t> after;  // [stream]: number of its operations that come first
    };
    std::vector<Captured> streams;  // the capture began on the first
    std::string broken;             // the error that invalidated the capture

    void begin(Stream::State& stream) {
        stream.captured = true;
        stream.number = streams.size();
        streams.push_back({&stream, std::vector<std::size_t>(stream.number + 1)});
    }
    void add(std::size_t stream, std::function<void()> work) {
        ++streams[stream].after[stream];
        operations.push_back({stream, std::move(work), {}, nullptr});
    }
    std::shared_ptr<Event::State::Record> record(std::size_t stream,
                                                 std::shared_ptr<Event::State> event) {
        const auto record = std::make_shared<Event::State::Record>();
        record->graph = weak_from_this();
        record->captured = true;
        record->operation = operations.size();
        record->after = streams[stream].after;
        operations.push_back({stream, {}, {}, std::move(event)});
        return record;
    }
    void wait(std::size_t stream, const Event::State::Record& record) {
        operations.push_back({stream, {}, record.operation, nullptr});
        std::vector<std::size_t>& after = streams[stream].after;
        after.resize(std::max(after.size(), record.after.size()));
        for (std::size_t i = 0; i < record.after.size(); ++i) {
            after[i] = std::max(after[i], record.after[i]);
        }
    }
    void end() {
        for (const Captured& stream : streams) {
            stream.state->captured = false;
        }
        const std::vector<std::size_t>& joined = streams[0].after;
        for (std::size_t i = 1; i < streams.size() && broken.empty(); ++i) {
            if (const std::size_t done = streams[i].after[i];
                done > (i < joined.size() ? joined[i] : 0)) {
                broken =
                    "the capture ends before its first stream has waited for all work of the "
                    "others (cudaErrorStreamCaptureUnjoined)";
            }
        }
    }
};

namespace {

[[noreturn]] void break_capture(const std::string& what) {
    if (capture != nullptr && capture->broken.empty()) {
        capture->broken = what;
    }
    throw gyre::Error(gyre::ExitCode::internal, what);
}
// Breaks the capture if the host makes this call while streams are captured.
void not_in_capture(const char* call) {
    if (capture != nullptr) {
        break_capture(fmt::format(
            "{} while a stream is captured (cudaErrorStreamCaptureUnsupported): a captured step "
            "can neither wait for the device nor allocate",
            call));
    }
}

}  // namespace

void Stream::State::submit(std::function<void()> work) {
    if (captured) {
        capture->add(number, std::move(work));
    } else {
        ++submissions;
        queue.push_back(std::move(work));
    }
}

Event::Event(bool timed) : state_(std::make_shared<State>(timed)) {}
Event::~Event() = default;
void Event::synchronize() const {
    not_in_capture("Event::synchronize");
    const auto record = state_->record;
    if (record == nullptr || record->passed) {
        return;
    }
    if (record->captured) {
        throw gyre::Error(gyre::ExitCode::internal,
                          "Event::synchronize for an event of a capture (cudaErrorCapturedEvent)");
    }
    record->stream->run_until(*record);
}
float Event::milliseconds(const Event& start, const Event& end) {
    for (const Event* event : {&start, &end}) {
        if (!event->state_->timed) {
            throw gyre::Error(gyre::ExitCode::internal,
                              "Event::milliseconds for an event that is not timed "
                              "(cudaErrorInvalidResourceHandle)");
        }
        if (event->state_->record == nullptr || !event->state_->record->passed) {
            throw gyre::Error(
                gyre::ExitCode::internal,
                "Event::milliseconds for an event that has not passed (cudaErrorNotReady)");
        }
    }
    return 0.0f;  // emulated time is meaningless
}

Stream::Stream(bool) : state_(std::make_unique<State>()) {}
Stream::~Stream() = default;

void* Stream::handle() {
    return this;
}

namespace {

// Appends work that reads device memory `from` and writes `to`, of which either may be null. There
// is none for 0 bytes, as in CUDA, where addresses may then be null; memcpy does not allow that.
template <typename Work>
void transfer(Stream::State& stream, void* to, const void* from, std::size_t bytes, Work work) {
    if (bytes == 0) {
        return;
    }
    stream.submit([=] {
        emulator::listener->device_copied(to, from, bytes);
        work();
    });
}

}  // namespace

void Stream::upload(void* device, const void* host, std::size_t bytes) {
    transfer(*state_, device, nullptr, bytes, [=] { std::memcpy(device, host, bytes); });
}
void Stream::download(void* host, const void* device, std::size_t bytes) {
    transfer(*state_, nullptr, device, bytes, [=] { std::memcpy(host, device, bytes); });
}
void Stream::copy(void* to, const void* from, std::size_t bytes) {
    transfer(*state_, to, from, bytes, [=] {
        ++copies;
        std::memcpy(to, from, bytes);
    });
}
void Stream::fill_zero(void* device, std::size_t bytes) {
    transfer(*state_, device, nullptr, bytes, [=] {
        ++copies;
        std::memset(device, 0, bytes);
    });
}
void Stream::record(Event& event) {
    if (state_->captured) {
        event.state_->record = capture->record(state_->number, nullptr);
        return;
    }
    const auto record = std::make_shared<Event::State::Record>();
    record->stream = state_.get();
    event.state_->record = record;
    state_->submit([record] { record->passed = true; });
}
void Stream::record_in_launches(Event& event) {
    if (!state_->captured) {
        throw gyre::Error(gyre::ExitCode::internal, "Stream::record_in_launches outside a capture");
    }
    capture->record(state_->number, event.state_);
}
void Stream::wait(const Event& event) {
    const auto record = event.state_->record;
    if (record == nullptr) {
        return;
    }
    if (!record->captured) {
        if (state_->captured) {
            break_capture(
                "a captured stream waits for an event that was recorded outside the capture "
                "(cudaErrorStreamCaptureIsolation)");
        }
        state_->submit([record] {
            if (!record->passed) {
                record->stream->run_until(*record);
            }
        });
        return;
    }
    if (capture == nullptr || record->graph.lock().get() != capture) {
        break_capture("a stream waits for an event of a capture that has ended");
    }
    if (!state_->captured) {
        capture->begin(*state_);
    }
    capture->wait(state_->number, *record);
}
void Stream::synchronize() {
    not_in_capture("Stream::synchronize");
    state_->run_all();
}

void emulator::submit(Stream& stream, std::function<void()> work) {
    stream.state().submit(std::move(work));
}
void emulator::set_multiprocessors(int count) {
    multiprocessors = count;
}
std::int64_t emulator::copy_count() {
    return copies;
}
std::int64_t emulator::submission_count() {
    return submissions;
}

Graph::Graph(Stream& stream, const std::function<void()>& submit)
    : state_(std::make_shared<State>()) {
    not_in_capture("a capture");
    capture = state_.get();
    state_->begin(stream.state());
    try {
        submit();
    } catch (...) {
        capture = nullptr;
        state_->end();
        throw;
    }
    capture = nullptr;
    state_->end();
    if (!state_->broken.empty()) {
        throw gyre::Error(gyre::ExitCode::internal, state_->broken);
    }
}
Graph::~Graph() = default;

// The streams of a launch run concurrently, as when they were captured: each has its own queue, and
// the first uses that of `stream`. Records and waits are separate for each launch.
void Graph::launch(Stream& stream) {
    not_in_capture("the launch of a graph");
    ++submissions;
    Stream::State& first = stream.state();
    const auto others = std::make_shared<std::vector<Stream::State>>(state_->streams.size());
    std::vector<std::shared_ptr<Event::State::Record>> records(state_->operations.size());
    for (std::size_t i = 0; i < records.size(); ++i) {
        const State::Operation& operation = state_->operations[i];
        Stream::State& on = operation.stream == 0 ? first : (*others)[operation.stream];
        if (operation.work) {
            on.queue.emplace_back([graph = state_, i] { graph->operations[i].work(); });
        } else if (operation.wait) {
            on.queue.emplace_back([record = records[*operation.wait]] {
                if (!record->passed) {
                    record->stream->run_until(*record);
                }
            });
        } else {
            const auto record = records[i] = std::make_shared<Event::State::Record>();
            record->stream = &on;
            if (operation.event != nullptr) {
                operation.event->record = record;
                record->stream = &first;  // which outlives the launch and completes after all of it
            }
            on.queue.emplace_back([record] { record->passed = true; });
        }
    }
    first.queue.emplace_back([others] {
        for (Stream::State& other : *others) {
            other.run_all();
        }
    });
}

namespace {

// First-fit allocation in one reserved range, so that the checker recognises device memory by its
// address.
class Heap {
 public:
    static Heap& instance() {
        static Heap* heap = new Heap;  // never destroyed, like the emulator's machine
        return *heap;
    }
    void* allocate(std::size_t bytes) {
        const std::lock_guard lock(mutex_);
        if (used_.empty()) {
            user_ = std::this_thread::get_id();
        } else if (user_ != std::this_thread::get_id()) {
            throw gyre::Error(
                gyre::ExitCode::internal,
                "two threads use the emulated GPU at once, but its kernels run on one: "
                "give each rank its own process");
        }
        const std::size_t rounded = (bytes + kAlignment - 1) / kAlignment * kAlignment;
        std::byte* at = range_.begin + kGap;
        for (const auto& [begin, used] : used_) {
            if (at + rounded + kGap <= begin) {
                break;
            }
            at = begin + (used + kAlignment - 1) / kAlignment * kAlignment + kGap;
        }
        if (rounded > static_cast<std::size_t>(range_.end - at)) {
            throw gyre::Error(
                gyre::ExitCode::internal,
                fmt::format("out of emulated device memory: {} MiB requested; the emulator "
                            "is for small runs: use a smaller batch or model",
                            bytes >> 20));
        }
        if (std::byte* end = std::min(at + rounded + kPoisoned, range_.end); end > poisoned_) {
            poison(poisoned_, static_cast<std::size_t>(end - poisoned_));
            poisoned_ = end;
        }
        used_.emplace(at, bytes);
        unpoison(at, bytes);
        ++count_;
        emulator::listener->device_allocated(at, bytes);
        return at;
    }
    void release(void* memory) {
        const std::lock_guard lock(mutex_);
        const auto found = used_.find(static_cast<std::byte*>(memory));
        if (found == used_.end()) {
            return;
        }
        poison(memory, found->second);
        emulator::listener->device_released(memory, found->second);
        used_.erase(found);
    }
    emulator::Range range() const { return range_; }
    std::int64_t count() const { return count_; }

 private:
    static constexpr std::size_t kBytes = std::size_t{4} << 30;
    static constexpr std::size_t kAlignment = 256;
    static constexpr std::size_t kGap = 256;
    // Poisoned bytes after the last allocation; the shadow of all 4 GiB would take half a GiB.
    static constexpr std::size_t kPoisoned = 4 << 20;

    Heap() {
        void* memory = mmap(nullptr, kBytes, PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (memory == MAP_FAILED) {
            throw gyre::Error(
                gyre::ExitCode::internal,
                fmt::format("the emulator could not reserve {} GiB of addresses; is there "
                            "a limit (ulimit -v)?",
                            kBytes >> 30));
        }
        range_ = {static_cast<std::byte*>(memory), static_cast<std::byte*>(memory) + kBytes};
        poisoned_ = range_.begin;
    }

    emulator::Range range_{};
    std::byte* poisoned_ = nullptr;  // end of the poisoned part
    std::mutex mutex_;
    std::map<std::byte*, std::size_t> used_;
    std::thread::id user_;  // the thread that owns the allocations
    std::int64_t count_ = 0;
};

}  // namespace

emulator::Range emulator::device_range() {
    return Heap::instance().range();
}
std::int64_t emulator::allocation_count() {
    return Heap::instance().count();
}

void* allocate(std::size_t bytes) {
    not_in_capture("an allocation");
    return Heap::instance().allocate(bytes);
}
void release(void* memory) noexcept {
    if (capture != nullptr) {
        capture->broken = "memory is released while a stream is captured";
    }
    Heap::instance().release(memory);
}
void* allocate_pinned(std::size_t bytes) {
    not_in_capture("an allocation");
    return ::operator new(bytes);
}
void release_pinned(void* memory) noexcept {
    ::operator delete(memory);
}

// A host has as many emulated GPUs as requested.
DeviceProperties select_device(int index, bool) {
    return {"emulated GPU", multiprocessors, kMostSharedBytes - kSystemSharedBytes,
            fmt::format("emulated:{:02x}.0", index),
            fmt::format("EMULATED-{}-{}", gyre::host_name(), index)};
}

}  // namespace simt
