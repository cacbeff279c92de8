// Resources shared by the CPU's operations: threads, and a workspace for the one that is running.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "base/round_up.hpp"
#include "kernels/cpu/simd.hpp"
#include "kernels/cpu/thread_pool.hpp"

namespace gyre::cpu {

inline int block_count(int n) {
    return (n + kLanes - 1) / kLanes;
}

// 64-byte aligned, zeroed memory; large blocks use huge pages to spare the TLB.
void* allocate_aligned(std::size_t bytes);
void release_aligned(void* memory) noexcept;

// Rounds up to a whole number of cache lines.
inline std::int64_t whole_lines(std::int64_t floats) {
    return round_up<std::int64_t>(floats, 16);
}

// Operations reserve what they need when they are created; a pass never allocates. Only one
// operation runs at a time, and contents do not survive from one operation to the next.
class Workspace {
 public:
    explicit Workspace(int workers) : workers_(static_cast<std::size_t>(workers)) {}
    // Ensures at least this many floats of shared memory and of memory per worker.
    void reserve(std::int64_t shared_floats, std::int64_t worker_floats);
    float* shared() const { return shared_.data; }
    float* worker(int i) const { return workers_[static_cast<std::size_t>(i)].data; }

 private:
    struct Block {
        Block() = default;
        Block(const Block&) = delete;
        Block& operator=(const Block&) = delete;
        ~Block() { release_aligned(data); }
        void reserve(std::int64_t floats);
        float* data = nullptr;
        std::int64_t elems = 0;
    };
    Block shared_;
    std::vector<Block> workers_;
};

struct Context {
    ThreadPool& pool;
    Workspace& workspace;

    // Calls body(begin, end) over pieces of [0, elems) on all threads.
    static constexpr std::int64_t kRange = 1 << 15;  // balances well at little overhead
    template <typename Body>
    void for_ranges(std::int64_t elems, Body&& body) const {
        pool.parallel_for((elems + kRange - 1) / kRange, [&](std::int64_t i, int) {
            body(i * kRange, std::min(elems, (i + 1) * kRange));
        });
    }
};

}  // namespace gyre::cpu
