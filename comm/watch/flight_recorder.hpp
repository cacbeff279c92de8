// Records a rank's last collective operations, and which of them it is waiting for.
#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <mutex>
#include <optional>
#include <set>
#include <string>

#include "comm/collective.hpp"

namespace gyre::comm {

// Written by the rank's thread, read by the watchdog's.
class FlightRecorder {
 public:
    static constexpr std::size_t kKept = 256;

    struct Entry {
        // on_stream: the device waits for it, but not the host.
        enum class State { started, on_stream, waiting, finished };
        std::int64_t number = -1;  // counts from 0 on each rank; the same operation on all
        Label label;
        State state = State::started;
        double started = 0.0, waited = -1.0, finished = -1.0;  // seconds since the recorder began
    };

    std::int64_t start(const Label& label);
    // wait(): the host waits. resume(): it no longer waits, but the operation is not complete.
    void wait(std::int64_t number);
    void resume(std::int64_t number);
    void wait_on_stream(std::int64_t number);
    void finish(std::int64_t number);

    // The operation that is waited for, and for how many seconds already.
    struct Waiting {
        Entry entry;
        double seconds;
    };
    std::optional<Waiting> waiting() const;
    // Returns the first operation that the device waits for, and the seconds since the last call.
    std::optional<Waiting> on_stream() const;
    std::optional<Entry> last() const;
    std::int64_t started() const;
    std::int64_t finished() const;
    std::string json(int rank, int size, const std::string& host, const std::string& reason) const;

 private:
    double now() const {
        return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin_).count();
    }
    Entry* find(std::int64_t number);
    Entry known(std::int64_t number) const;

    mutable std::mutex mutex_;
    const std::chrono::steady_clock::time_point begin_ = std::chrono::steady_clock::now();
    std::array<Entry, kKept> kept_;  // entry number n is at n % kKept
    std::int64_t started_ = 0, finished_ = 0;
    std::int64_t waiting_ = -1;
    double last_call_ = 0.0;            // time of the rank's last call
    std::set<std::int64_t> on_stream_;  // operations on the stream that are not finished
};

}  // namespace gyre::comm
