// The last collectives of a rank: what it did, and what it was waiting for.
#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <mutex>
#include <optional>
#include <set>
#include <string>

namespace gyre::comm {

struct Collective {
    enum class State { started, followed, waiting, finished };
    std::int64_t number = -1;  // counts from 0 on each rank; the same collective on all
    std::string kind;          // such as allreduce(fp32)
    std::int64_t bytes = 0;
    std::int64_t step = -1;  // of the training, and bucket of its gradients; -1: none
    int bucket = -1;
    State state = State::started;
    double started = 0.0, waited = -1.0, finished = -1.0;  // seconds since the recorder began
};

// Written by the rank's thread, read by the watchdog's.
class FlightRecorder {
 public:
    static constexpr std::size_t kKept = 256;

    std::int64_t start(const std::string& kind, std::int64_t bytes, std::int64_t step, int bucket);
    void wait(std::int64_t number);
    // The wait is over, but not the collective; from follow() on the device waits for it.
    void resume(std::int64_t number);
    void follow(std::int64_t number);
    void finish(std::int64_t number);

    // What the rank waits for now, and for how many seconds.
    struct Waiting {
        Collective collective;
        double seconds;
    };
    std::optional<Waiting> waiting() const;
    // The first that the device waits for, and for how long the rank has been silent meanwhile.
    std::optional<Waiting> following() const;
    std::optional<Collective> last() const;
    std::int64_t started() const;
    std::int64_t finished() const;
    std::string json(int rank, int size, const std::string& host, const std::string& reason) const;

 private:
    double now() const {
        return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin_).count();
    }
    Collective* find(std::int64_t number);
    Collective known(std::int64_t number) const;

    mutable std::mutex mutex_;
    const std::chrono::steady_clock::time_point begin_ = std::chrono::steady_clock::now();
    std::array<Collective, kKept> kept_;  // of number n at n % kKept
    std::int64_t started_ = 0, finished_ = 0;
    std::int64_t waiting_ = -1;
    double last_call_ = 0.0;           // when the rank last said something
    std::set<std::int64_t> followed_;  // not finished
};

}  // namespace gyre::comm
