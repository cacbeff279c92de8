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
#include <new>

#include "kernels/emulation/emulator.hpp"
#include "kernels/emulation/sanitizer.hpp"
#include "kernels/error.hpp"
#include "kernels/host_name.hpp"

namespace gyre::emulated {

// What the event was last recorded as. Streams that wait keep the state of that moment.
struct Event::State {
    struct Record {
        Stream::State* stream = nullptr;
        bool passed = false;
    };
    std::shared_ptr<Record> record;
};

struct Stream::State {
    std::deque<std::function<void()>> queue;

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
};

Event::Event() : state_(std::make_shared<State>()) {}
Event::~Event() = default;
void Event::synchronize() const {
    if (const auto record = state_->record) {
        record->stream->run_until(*record);
    }
}
float Event::milliseconds(const Event&, const Event&) {
    return 0.0f;  // emulated time means nothing
}

Stream::Stream() : state_(std::make_unique<State>()) {}
Stream::~Stream() = default;

void* Stream::handle() {
    return this;
}

void Stream::upload(void* device, const void* host, std::size_t bytes) {
    state_->queue.push_back([=] {
        std::memcpy(device, host, bytes);
        if (emulator::listener != nullptr) {
            emulator::listener->device_copied(device, nullptr, bytes);
        }
    });
}
void Stream::download(void* host, const void* device, std::size_t bytes) {
    state_->queue.push_back([=] {
        if (emulator::listener != nullptr) {
            emulator::listener->device_copied(nullptr, device, bytes);
        }
        std::memcpy(host, device, bytes);
    });
}
void Stream::copy(void* to, const void* from, std::size_t bytes) {
    state_->queue.push_back([=] {
        std::memcpy(to, from, bytes);
        if (emulator::listener != nullptr) {
            emulator::listener->device_copied(to, from, bytes);
        }
    });
}
void Stream::fill_zero(void* device, std::size_t bytes) {
    state_->queue.push_back([=] {
        std::memset(device, 0, bytes);
        if (emulator::listener != nullptr) {
            emulator::listener->device_copied(device, nullptr, bytes);
        }
    });
}
void Stream::record(Event& event) {
    const auto record = std::make_shared<Event::State::Record>();
    record->stream = state_.get();
    event.state_->record = record;
    state_->queue.push_back([record] { record->passed = true; });
}
void Stream::wait(const Event& event) {
    if (const auto record = event.state_->record) {
        state_->queue.push_back([record] {
            if (!record->passed) {
                record->stream->run_until(*record);
            }
        });
    }
}
void Stream::synchronize() {
    while (!state_->queue.empty()) {
        state_->run_one();
    }
}

void emulator::submit(Stream& stream, std::function<void()> work) {
    stream.state().queue.push_back(std::move(work));
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
    std::map<std::byte*, std::size_t> used_;
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
    return Heap::instance().allocate(bytes);
}
void release(void* memory) noexcept {
    Heap::instance().release(memory);
}
void* allocate_pinned(std::size_t bytes) {
    return ::operator new(bytes);
}
void release_pinned(void* memory) noexcept {
    ::operator delete(memory);
}

// A host has as many emulated GPUs as are asked for.
DeviceProperties select_device(int index, bool) {
    return {"emulated GPU", 4, fmt::format("emulated:{:02x}.0", index),
            fmt::format("EMULATED-{}-{}", host_name(), index)};
}

}  // namespace gyre::emulated
