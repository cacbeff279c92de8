// Runs kernels on the CPU, a fiber for each CUDA thread, and reports what is wrong with them.
//
// The blocks of a grid run one after another, those of a cluster side by side; the threads of a
// block or cluster take turns, and change only where a barrier or a warp operation makes them wait.
// Whatever order a schedule picks is one the GPU might pick as well, so a kernel must give the same
// result under all of them. Reports:
//   always: divergent barriers and warp operations, threads that leave while others wait, blocks
//     whose size is no multiple of 32, too much shared memory, clusters that do not divide the
//     grid, and barriers of clusters that a thread does not reach, or not wait for;
//   with AddressSanitizer: accesses outside device and shared memory;
//   with the checker (checker.hpp): the same, races, uninitialised reads, misaligned accesses, host
//     code that touches device memory.
// A report ends the launch with Error (internal) that names kernel, block, thread and source line.
//
// There is one emulated GPU in a process, used by one thread at a time, as CUDA's own names such as
// threadIdx are global too.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <source_location>
#include <string>

#include "kernels/emulation/async_copies.hpp"

namespace gyre::emulated {

class Stream;

struct uint3 {
    unsigned x = 0, y = 0, z = 0;
};
struct dim3 {
    unsigned x = 1, y = 1, z = 1;
    dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
    std::size_t count() const { return std::size_t{x} * y * z; }
};

namespace emulator {

using Place = std::source_location;

// Blocks of a cluster, as every GPU with clusters has them; and here, their threads.
constexpr unsigned kMostCluster = 8, kMostClusterThreads = 2048;

struct Thread {
    uint3 index, block;
    unsigned linear = 0;  // in the block
    unsigned rank = 0;    // of the block in its cluster
    unsigned id = 0;      // in the cluster: rank * threads of a block + linear
    AsyncCopies copies;
    bool landing = false;  // copies land: no accesses of the kernel's own
};
extern Thread* thread;  // the one that runs
extern dim3 block_extent, grid_extent;
extern unsigned cluster_blocks;

// For all threads of the block, or all 32 lanes of the warp.
void sync_block(const Place& place);
void sync_warp(const Place& place);
enum class WarpOperation {
    sync,
    sum_float,
    sum_double,
    argmax,
    load_matrices,
    load_matrices_transposed,
    mma_tf32,
    mma_bf16,
    mma_f16
};
struct ArgMax {
    float value;
    int index;
};
struct Mma {
    float (&d)[4];
    const std::uint32_t (&a)[4];
    const std::uint32_t (&b)[2];
};
// A row of 16 bytes that the lane has read, and what it gets.
struct LoadMatrices {
    const std::uint32_t (&row)[4];
    std::uint32_t (&result)[4];
};
// Each lane hands over its operand; the last to arrive computes for all.
void warp_operation(WarpOperation operation, void* operand, const Place& place);

// One thread runs at a time, so nothing can come between; the checker does not see it.
void atomic_max(std::int32_t* at, std::int32_t value);

// Likewise; the checker is told of the arrival. Where launches run only some of their blocks, the
// block of the largest index counts as the last.
bool arrives_last(std::uint32_t* count, std::uint32_t blocks, std::uint32_t index);

// An asynchronous copy by the thread that runs, which has filled `to` with NaN, and lands what
// thread->copies.land() hands it, so that the checker sees both.
void issue_copy(const AsyncCopy& copy);

// Reports an address that is no multiple of 16, or `shared` and not in shared memory. Of `what`.
void check_address(const void* at, bool shared, const char* what);

// For all threads of the cluster: who has arrived goes on, and waits before it arrives again.
void arrive_at_cluster(const Place& place);
void wait_for_cluster(const Place& place);
// The place of the block's shared memory `at` in that of the cluster's block of this rank.
void* map_shared_rank(void* at, unsigned rank);
// Of the block whose shared memory it is.
unsigned shared_rank(const void* at);

// Memory of the block for the declaration `key`; filled with NaN when the block starts.
void* shared_variable(const void* key, const char* name, std::size_t bytes, std::size_t alignment);

// The launch's dynamic shared memory, likewise.
void* dynamic_shared();

struct Launch {
    const char* kernel = "";
    const void* entry = nullptr;  // the function
    dim3 grid, block;
    std::size_t shared_bytes = 0;  // dynamic
    unsigned cluster = 1;          // blocks, along x
};
void run_grid(const Launch& launch, const std::function<void()>& body);
// Appends work to a stream.
void submit(Stream& stream, std::function<void()> work);

// The order in which blocks and threads run: 0: by index; others: at random, the same for the same
// seed. Mixes depth-first runs of single warps with uniform picks.
void set_schedule(std::uint64_t seed);
// Launches run at most this many of their blocks, evenly spread, and then their results are of no
// use: for looking at kernels on large grids, or with 0 at launches alone. Negative: all blocks.
void set_most_blocks(std::int64_t count);
bool runs_all_blocks();
// What the emulated GPU says it has; 4 unless set, before a backend is made. No kernel's results
// depend on it.
void set_multiprocessors(int count);
// Allocations of device memory so far, to show that a step makes none.
std::int64_t allocation_count();
// Kernels run so far.
std::int64_t launch_count();
// Times that the host has submitted work to a stream so far; the launch of a graph is one.
std::int64_t submission_count();

// Ends the launch with this report. For the checker.
// It takes the text along: nobody comes back to the kernel to free it.
[[noreturn]] void report(std::string what);
bool in_kernel();

// Where device and shared memory lie.
struct Range {
    std::byte *begin, *end;
    bool contains(const void* at) const { return at >= begin && at < end; }
};
Range device_range();
Range shared_range();

// What the checker or the profiler wants to know; without them nobody listens.
struct Listener {
    virtual ~Listener() = default;
    virtual void launch_begins(const Launch& /*launch*/) {}
    // One block, or those of a cluster.
    virtual void blocks_begin() {}
    virtual void block_barrier(unsigned /*rank*/) {}
    // The running thread's part in a barrier of the cluster; and all threads have arrived.
    virtual void cluster_arrived() {}
    virtual void cluster_complete() {}
    virtual void cluster_waited() {}
    virtual void thread_ends() {}
    // All lanes of the cluster's warp have arrived; barriers of warps are such an operation, too.
    virtual void warp_operation(unsigned /*warp*/, WarpOperation /*operation*/) {}
    // A thread of the block arrives for it at a count that blocks share.
    virtual void block_arrives(const void* /*count*/, bool /*last*/) {}
    virtual void blocks_end() {}
    virtual void launch_ends(std::int64_t /*blocks_run*/) {}
    virtual void shared_declared(void* /*at*/, std::size_t /*bytes*/) {}
    // An asynchronous copy has yet to bring this.
    virtual void copy_issued(void* /*to*/, std::size_t /*bytes*/) {}
    virtual void device_allocated(void* /*at*/, std::size_t /*bytes*/) {}
    virtual void device_released(void* /*at*/, std::size_t /*bytes*/) {}
    // Streams copy and fill device memory; source or target may be null where it is the host's.
    virtual void device_copied(void* /*to*/, const void* /*from*/, std::size_t /*bytes*/) {}
};
extern Listener* listener;

}  // namespace emulator
}  // namespace gyre::emulated
