// How a rank waits for what it has to poll for: at full speed for a short time, in which a rank
// that is as fast as the others is answered, then with sleeps that grow with the wait. On a
// processor that is shared, who spins for long, or yields, has used up its share when the answer
// arrives.
#pragma once

#include <algorithm>
#include <chrono>
#include <thread>

namespace gyre::comm {

class Backoff {
    using Clock = std::chrono::steady_clock;

 public:
    // After a poll that did not find what is waited for.
    void pause() {
        const auto now = Clock::now();
        if (now - polled_ > kWork) {
            begin_ = now;  // the poll moved data: more will follow soon
        } else if (now - begin_ > kSpin) {
            // A wait becomes longer by an eighth, at most.
            std::this_thread::sleep_for(
                std::clamp<Clock::duration>((now - begin_) / 8, kLeast, kMost));
            polled_ = Clock::now();
            return;
        }
        polled_ = now;
    }

 private:
    // Of a poll that moved data.
    static constexpr std::chrono::microseconds kWork{5};
    // With 50, two ranks on a quiet machine lost a twentieth; 400 gained nothing more.
    static constexpr std::chrono::microseconds kSpin{200};
    static constexpr std::chrono::microseconds kLeast{20}, kMost{1000};
    Clock::time_point begin_ = Clock::now(), polled_ = begin_;
};

}  // namespace gyre::comm
