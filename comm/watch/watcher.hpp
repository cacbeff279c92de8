// The watchdog's thread: watches this rank's waits, tells the other ranks its progress, and ends
// the job if a wait is too long, a rank is gone or the library has failed.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <optional>
#include <string>
#include <thread>

#include "comm/communicator.hpp"
#include "comm/watch/flight_recorder.hpp"
#include "comm/watch/peers.hpp"
#include "comm/watch/watchdog.hpp"

namespace gyre::comm {

// Prints why a rank ends the job, with the exit code that it does so with.
void print_end(int rank, const std::string& host, const std::string& reason,
               const WatchOptions& options);

class Watcher {
 public:
    // The name of an operation whose wait has a separate deadline.
    static constexpr const char* kSetUp = "set-up of reductions";

    // Called by all ranks. comm: the communicator whose waits are watched; it outlives this.
    Watcher(Communicator& comm, const WatchOptions& options);
    ~Watcher();
    Watcher(const Watcher&) = delete;
    Watcher& operator=(const Watcher&) = delete;

    FlightRecorder& recorder() { return recorder_; }
    // Sets the step that this rank is in.
    void set_step(std::int64_t step) { step_ = step; }
    // Reports that the rank has met an error of the library and does not continue.
    void set_failure(const std::string& what);

 private:
    void watch();
    void end_if_failed();
    void end_if_library_failed();
    void end_if_late(const FlightRecorder::Waiting& waiting);
    void end_if_not_whole();
    void exchange();
    void pause() const;
    std::optional<FlightRecorder::Waiting> pending() const;
    std::string failure();
    bool is_speaker();
    [[noreturn]] void fail(const std::string& reason);

    Communicator& comm_;
    const WatchOptions options_;
    FlightRecorder recorder_;
    std::atomic<std::int64_t> step_{-1};
    std::atomic<bool> leaving_{false};
    std::mutex failure_mutex_;
    std::string failure_;
    // Used only by the thread.
    Peers peers_;
    bool reporting_ = false, failing_ = false;
    Clock::time_point last_asked_ = Clock::now();
    Clock::time_point last_whole_ = Clock::now();  // when nobody was gone
    std::int64_t warned_of_ = -1;
    std::thread thread_;
};

}  // namespace gyre::comm
