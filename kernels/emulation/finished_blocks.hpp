// Tracks blocks that have arrived at a shared counter (arrives_last), in ticks of the checker's
// clocks.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <utility>
#include <vector>

namespace simt {

class FinishedBlocks {
 public:
    void begin_launch() { arrivals_.clear(); }
    void begin_block() { known_.clear(); }
    // A thread arrives on behalf of its block, which began at tick `begin` and had its last barrier
    // at `now`.
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
    // True if an access of another block at tick `when` is ordered before this thread of the block
    // that arrived last.
    bool known(std::uint32_t when, std::uint32_t now, unsigned thread) const {
        return !known_.empty() && (now > known_from_ || thread == known_to_) &&
               std::any_of(known_.begin(), known_.end(), [when](const Done& done) {
                   return done.begin <= when && when < done.end;
               });
    }

 private:
    // The ticks [begin, end) of a block, which arrived at `end`.
    struct Done {
        std::uint32_t begin, end;
    };
    std::map<const void*, std::vector<Done>> arrivals_;  // of this launch
    std::vector<Done> known_;                            // known to this block, which arrived last
    std::uint32_t known_from_ = 0;                       // when this block's thread arrived ...
    unsigned known_to_ = 0;  // ... and which one; others know it after the next barrier
};

}  // namespace simt
