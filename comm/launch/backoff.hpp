// How a rank waits for what it has to poll for: at full speed for a short time, in which a rank
// that is as fast as the others is answered, then with sleeps that grow with the wait. On a
// processor that is shared, who spins for long, or yields, has used up its share when the answer
// arrives; so where spinning was in vain, the next wait spins less.
#pragma once

#include <algorithm>
#include <chrono>
#include <thread>

namespace gyre::comm {

// For how long the waits of one rank spin. Not for several threads at a time.
class SpinTime {
 public:
    std::chrono::nanoseconds value() const { return value_; }
    void was_enough() { value_ = std::min(2 * value_, kMost); }
    void was_in_vain() { value_ = std::max(value_ / 4, kLeast); }

 private:
    // At most 50 us lost two ranks on a quiet machine a twentieth; 400 gained nothing more.
    static constexpr std::chrono::nanoseconds kLeast{10'000}, kMost{200'000};
    std::chrono::nanoseconds value_ = kMost;
};

class Backoff {
    using Clock = std::chrono::steady_clock;

 public:
    explicit Backoff(SpinTime& spin) : spin_(spin) {}
    ~Backoff() {
        if (!slept_) {
            spin_.was_enough();
        }
    }
    Backoff(const Backoff&) = delete;
    Backoff& operator=(const Backoff&) = delete;

    // Called after a poll that has not found what is waited for.
    void pause() {
        const auto now = Clock::now();
        if (now - polled_ > kWork) {
            begin_ = now;  // the poll moved data: more will follow soon
        } else if (now - begin_ > spin_.value()) {
            if (!slept_) {
                spin_.was_in_vain();
            }
            slept_ = true;
            // A wait becomes longer by an eighth, at most.
            std::this_thread::sleep_for(
                std::clamp<Clock::duration>((now - begin_) / 8, kLeast, kMost));
            polled_ = Clock::now();
            return;
        }
        polled_ = now;
    }

 private:
    // A poll that takes longer has moved data.
    static constexpr std::chrono::microseconds kWork{5};
    static constexpr std::chrono::microseconds kLeast{20}, kMost{1000};
    SpinTime& spin_;
    bool slept_ = false;
    Clock::time_point begin_ = Clock::now(), polled_ = begin_;
};

}  // namespace gyre::comm
