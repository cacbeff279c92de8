// The shared memory of the emulated blocks that run side by side, those of a cluster: the same
// variables at the same places in each.
#pragma once

#include <cstddef>
#include <vector>

#include "kernels/emulation/emulator.hpp"

namespace gyre::emulated::emulator {

class SharedMemory {
 public:
    SharedMemory();

    // For a launch in clusters of so many blocks; what was declared before is gone.
    void begin_launch(unsigned blocks);
    // Fills all variables with NaN, for the next blocks.
    void begin_blocks();
    // Of the block of this rank; declared where there is no such key. Null: there is no more room.
    void* variable(unsigned rank, const void* key, std::size_t bytes, std::size_t alignment);
    // Null: not declared.
    void* find(unsigned rank, const void* key) const;

    // What lies at the place of `at` in the block of another rank.
    void* of_rank(void* at, unsigned rank) const;
    // Of the block whose memory it is.
    unsigned rank_of(const void* at) const;
    Range range() const { return {memory_, memory_ + kMostCluster * pitch_}; }

 private:
    struct Variable {
        const void* key;
        std::size_t at, bytes;
    };
    std::byte* of(unsigned rank) const { return memory_ + rank * pitch_; }
    std::size_t offset(const void* at) const {
        return static_cast<std::size_t>(static_cast<const std::byte*>(at) - memory_);
    }

    std::byte* memory_;
    std::size_t pitch_, used_ = 0;
    unsigned blocks_ = 1;
    std::vector<Variable> variables_;
};

}  // namespace gyre::emulated::emulator
