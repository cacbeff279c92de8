// What is known of blocks that have arrived at a count which they share (arrives_last), in ticks of
// the checker's clocks.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <utility>
#include <vector>

namespace gyre::emulated {

class FinishedBlocks {
 public:
    void begin_launch() { arrivals_.clear(); }
    void begin_block() { known_.clear(); }
    // A thread arrives for its block, which began at a tick, and had its last barrier at `now`.
    void arrives(const void* count, bool last, std::uint32_t begin, std::uint32_t now,
                 unsigned thread) {
        std::vector<Done>& done = arrivals_[count];
        if (last) {
            known_ = std::move(done);
            known_from_ = now;
            known_to_ = thread;
            arrivals_.erase(count);
        } else {
            done.push_back({begin, now});
        }
    }
    // Whether what another block did then is known, by a thread of the one that was last, to have
    // come before.
    bool known(std::uint32_t when, std::uint32_t now, unsigned thread) const {
        return !known_.empty() && (now > known_from_ || thread == known_to_) &&
               std::any_of(known_.begin(), known_.end(), [when](const Done& done) {
                   return done.begin <= when && when < done.end;
               });
    }

 private:
    // From `begin` to before `end`, when a thread arrived for it.
    struct Done {
        std::uint32_t begin, end;
    };
    std::map<const void*, std::vector<Done>> arrivals_;  // of this launch
    std::vector<Done> known_;                            // by this block, as it was the last
    std::uint32_t known_from_ = 0;                       // when its thread arrived ...
    unsigned known_to_ = 0;  // ... which others join at the next barrier
};

}  // namespace gyre::emulated
