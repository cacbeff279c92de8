// Memory, streams and events of the emulated GPU.
//
// Streams are lazy: work is queued, and run only when somebody waits for it. A stream that forgot
// to wait for another therefore reads what was there before, every time, instead of once in a
// while.
#include "kernels/cuda/runtime.hpp"

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

#include "kernels/base/error.hpp"
#include "kernels/base/host_name.hpp"
#include "kernels/emulation/emulator.hpp"
#include "kernels/emulation/sanitizer.hpp"

namespace gyre::emulated {

namespace {

std::int64_t submissions = 0;
int multiprocessors = 4;
Graph::State* capture = nullptr;  // the one under way

}  // namespace

// What the event was last recorded as. Streams that wait keep the state of that moment.
struct Event::State {
    struct Record {
        Stream::State* stream = nullptr;
        bool passed = false;
        // Recorded in a capture: by this operation, and after so many of each stream.
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
    std::size_t number = 0;  // of the stream in the capture

    void submit(std::function<void()> work);
    void run_one() {
        const auto work = std::move(queue.front());
        queue.pop_front();
        try {
            work();
        } catch (...) {
            queue.clear();  // as after an error on a GPU; the host's buffers may be gone soon
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
        std::function<void()> work;           // or, if empty:
        std::optional<std::size_t> wait;      // for the record that this operation makes, or
        std::shared_ptr<Event::State> event;  // a record; of an event of the host's, or null
    };
    std::vector<Operation> operations;
    struct Captured {
        Stream::State* state;
        std::vector<std::size_t> after;  // [stream]: so much of its work comes before what follows
    };
    std::vector<Captured> streams;  // the first is where the capture began
    std::string broken;             // what made the capture void

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
    throw Error(ExitCode::internal, what);
}
// The host may not do this while streams are captured.
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
        throw Error(ExitCode::internal,
                    "Event::synchronize for an event of a capture (cudaErrorCapturedEvent)");
    }
    record->stream->run_until(*record);
}
float Event::milliseconds(const Event& start, const Event& end) {
    for (const Event* event : {&start, &end}) {
        if (!event->state_->timed) {
            throw Error(ExitCode::internal,
                        "Event::milliseconds for an event that is not timed "
                        "(cudaErrorInvalidResourceHandle)");
        }
        if (event->state_->record == nullptr || !event->state_->record->passed) {
            throw Error(ExitCode::internal,
                        "Event::milliseconds for an event that has not passed (cudaErrorNotReady)");
        }
    }
    return 0.0f;  // emulated time means nothing
}

Stream::Stream() : state_(std::make_unique<State>()) {}
Stream::~Stream() = default;

void* Stream::handle() {
    return this;
}

// Copies of nothing are no copies, as in CUDA: their addresses may be null, which memcpy forbids.
void Stream::upload(void* device, const void* host, std::size_t bytes) {
    if (bytes == 0) {
        return;
    }
    state_->submit([=] {
        std::memcpy(device, host, bytes);
        if (emulator::listener != nullptr) {
            emulator::listener->device_copied(device, nullptr, bytes);
        }
    });
}
void Stream::download(void* host, const void* device, std::size_t bytes) {
    if (bytes == 0) {
        return;
    }
    state_->submit([=] {
        if (emulator::listener != nullptr) {
            emulator::listener->device_copied(nullptr, device, bytes);
        }
        std::memcpy(host, device, bytes);
    });
}
void Stream::copy(void* to, const void* from, std::size_t bytes) {
    if (bytes == 0) {
        return;
    }
    state_->submit([=] {
        std::memcpy(to, from, bytes);
        if (emulator::listener != nullptr) {
            emulator::listener->device_copied(to, from, bytes);
        }
    });
}
void Stream::fill_zero(void* device, std::size_t bytes) {
    if (bytes == 0) {
        return;
    }
    state_->submit([=] {
        std::memset(device, 0, bytes);
        if (emulator::listener != nullptr) {
            emulator::listener->device_copied(device, nullptr, bytes);
        }
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
        throw Error(ExitCode::internal, "Stream::record_in_launches outside a capture");
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
        throw Error(ExitCode::internal, state_->broken);
    }
}
Graph::~Graph() = default;

// The streams of a launch run side by side, as when they were captured: each has a queue, the
// first's is the stream's own. What is recorded and waited for is the launch's.
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
                record->stream = &first;  // which outlives the launch, and ends with all of it
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

// First fit in one reserved range, so that the checker can tell device memory by its address.
class Heap {
 public:
    static Heap& instance() {
        static Heap* heap = new Heap;  // never destroyed, like the machine
        return *heap;
    }
    void* allocate(std::size_t bytes) {
        const std::lock_guard lock(mutex_);
        if (used_.empty()) {
            user_ = std::this_thread::get_id();
        } else if (user_ != std::this_thread::get_id()) {
            throw Error(ExitCode::internal,
                        "two threads use the emulated GPU at once, and its kernels run on one: "
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
            throw Error(ExitCode::internal,
                        fmt::format("out of emulated device memory: {} MiB asked for; the emulator "
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
        if (emulator::listener != nullptr) {
            emulator::listener->device_allocated(at, bytes);
        }
        return at;
    }
    void release(void* memory) {
        const std::lock_guard lock(mutex_);
        const auto found = used_.find(static_cast<std::byte*>(memory));
        if (found == used_.end()) {
            return;
        }
        poison(memory, found->second);
        if (emulator::listener != nullptr) {
            emulator::listener->device_released(memory, found->second);
        }
        used_.erase(found);
    }
    emulator::Range range() const { return range_; }
    std::int64_t count() const { return count_; }

 private:
    static constexpr std::size_t kBytes = std::size_t{4} << 30;
    static constexpr std::size_t kAlignment = 256;
    static constexpr std::size_t kGap = 256;
    // Behind the last allocation; the shadow of all 4 GiB would take half a GiB of memory.
    static constexpr std::size_t kPoisoned = 4 << 20;

    Heap() {
        void* memory = mmap(nullptr, kBytes, PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (memory == MAP_FAILED) {
            throw Error(ExitCode::internal,
                        fmt::format("the emulator could not reserve {} GiB of addresses; is there "
                                    "a limit (ulimit -v)?",
                                    kBytes >> 30));
        }
        range_ = {static_cast<std::byte*>(memory), static_cast<std::byte*>(memory) + kBytes};
        poisoned_ = range_.begin;
    }

    emulator::Range range_{};
    std::byte* poisoned_ = nullptr;  // up to here
    std::mutex mutex_;
    std::map<std::byte*, std::size_t> used_;
    std::thread::id user_;  // whose memory there is
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

// A host has as many emulated GPUs as are asked for.
DeviceProperties select_device(int index, bool) {
    return {"emulated GPU", multiprocessors, kMostSharedBytes,
            fmt::format("emulated:{:02x}.0", index),
            fmt::format("EMULATED-{}-{}", host_name(), index)};
}

}  // namespace gyre::emulated
