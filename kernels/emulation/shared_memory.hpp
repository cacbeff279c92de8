// The shared memory of the emulated blocks of a cluster, with the same variables at the same
// offsets in each.
#pragma once

#include <cstddef>
#include <vector>

#include "kernels/emulation/emulator.hpp"

namespace simt::emulator {

class SharedMemory {
 public:
    SharedMemory();

    // Begins a launch with clusters of `blocks` blocks; forgets all declarations.
    void begin_launch(unsigned blocks);
    // Fills all variables with NaN for the next blocks.
    void begin_blocks();
    // The variable of the block `rank`; declares it if the key is new. Null: there is no room left.
    void* variable(unsigned rank, const void* key, std::size_t bytes, std::size_t alignment);
    // Returns null if the key is not declared.
    void* find(unsigned rank, const void* key) const;

    // Maps `at` to the same offset in the block of another rank.
    void* of_rank(void* at, unsigned rank) const;
    // The rank of the block that owns this memory.
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

}  // namespace simt::emulator
