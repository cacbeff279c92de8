// Asynchronous copies (cp.async) of the emulated threads. Each lands at the latest moment that the
// hardware allows, which is in the wait of the thread that issued it: what is read before has NaN.
#pragma once

#include <cstddef>
#include <vector>

namespace gyre::emulated::emulator {

constexpr std::size_t kCopyBytes = 16;

// From null: zeros.
struct AsyncCopy {
    void* to;
    const void* from;
};

// Of one thread.
class AsyncCopies {
 public:
    void clear() {
        copies_.clear();
        landed_ = 0;
        group_ = 0;
    }
    void issue(const AsyncCopy& copy) { copies_.push_back({copy, group_}); }
    void commit() { ++group_; }
    // The next copy that must land before no more than `pending` of the latest committed groups are
    // under way; null: none.
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
    unsigned group_ = 0;  // the one that is not committed yet
};

}  // namespace gyre::emulated::emulator
