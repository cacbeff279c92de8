// Asynchronous copies (cp.async) of the emulated threads. Each completes at the latest moment that
// the hardware allows, in the wait of the thread that issued it; earlier reads of its destination
// see NaN.
#pragma once

#include <cstddef>
#include <vector>

namespace simt::emulator {

constexpr std::size_t kCopyBytes = 16;

// from == null: fills with zeros.
struct AsyncCopy {
    void* to;
    const void* from;
};

// The copies of one thread.
class AsyncCopies {
 public:
    void clear() {
        copies_.clear();
        landed_ = 0;
        group_ = 0;
    }
    void issue(const AsyncCopy& copy) { copies_.push_back({copy, group_}); }
    void commit() { ++group_; }
    // Returns the next copy that must land so that at most the `pending` latest committed groups
    // are in flight; null: none.
    const AsyncCopy* land(unsigned pending) {
        if (landed_ == copies_.size()) {
            copies_.clear();
            landed_ = 0;
            return nullptr;
        }
        const Copy& next = copies_[landed_];
        if (next.group + pending >= group_) {
            return nullptr;
        }
        ++landed_;
        return &next.copy;
    }
    std::size_t under_way() const { return copies_.size() - landed_; }

 private:
    struct Copy {
        AsyncCopy copy;
        unsigned group;
    };
    std::vector<Copy> copies_;
    std::size_t landed_ = 0;
    unsigned group_ = 0;  // the group not yet committed
};

}  // namespace simt::emulator
