// Runs kernels on the CPU, one fiber per CUDA thread, and reports their errors.
//
// The blocks of a grid run one after another, those of a cluster concurrently. The threads of a
// block or cluster take turns, and only switch when a barrier or a warp operation makes them wait.
// A GPU might pick any order that a schedule picks, so a kernel must give the same result under all
// schedules. Reports:
//   always: divergent barriers and warp operations, threads that exit while others wait, blocks
//     whose size is not a multiple of 32, too much shared memory, clusters that do not divide the
//     grid, and cluster barriers that a thread does not reach or does not wait for;
//   with AddressSanitizer: accesses outside device and shared memory;
//   with the checker (checker.hpp): also races, uninitialised reads, misaligned accesses and host
//     code that touches device memory.
// A report ends the launch with Error (internal) that names kernel, block, thread and source line.
//
// A process has one emulated GPU, used by one thread at a time, since CUDA's own names such as
// threadIdx are global too.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <source_location>
#include <span>
#include <string>

#include "kernels/emulation/async_copies.hpp"

namespace simt {

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

// Limits of a cluster: blocks, as on every GPU with clusters; and threads, in the emulator.
constexpr unsigned kMostCluster = 8, kMostClusterThreads = 2048;

struct Thread {
    uint3 index, block;
    unsigned linear = 0;  // in the block
    unsigned rank = 0;    // of the block in its cluster
    unsigned id = 0;      // in the cluster: rank * threads of a block + linear
    AsyncCopies copies;
    bool landing = false;  // its copies are landing, which are not the kernel's own accesses
};
extern Thread* thread;  // the running thread
extern dim3 block_extent, grid_extent;
extern unsigned cluster_blocks;

// Called by all threads of the block, or all 32 lanes of the warp.
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
// The 16-byte row that the lane has read, and its result.
struct LoadMatrices {
    const std::uint32_t (&row)[4];
    std::uint32_t (&result)[4];
};
// Each lane passes its operand; the last to arrive computes for all.
void warp_operation(WarpOperation operation, void* operand, const Place& place);

// Atomic because one thread runs at a time; not visible to the checker.
void atomic_max(std::int32_t* at, std::int32_t value);
void atomic_add(std::uint32_t* at, std::uint32_t value);
void atomic_add(std::int64_t* at, std::int64_t value);

// The same, but the checker is notified of the arrival. If launches run only some of their blocks,
// the block with the largest index counts as the last.
bool arrives_last(std::uint32_t* count, std::uint32_t blocks, std::uint32_t index);

// Issues an asynchronous copy of the running thread. The caller fills `to` with NaN, and performs
// the copies returned by thread->copies.land(), so that the checker sees both.
void issue_copy(const AsyncCopy& copy);

// Reports an address of `what` not a multiple of 16 or, if `shared`, not in shared memory.
void check_address(const void* at, bool shared, const char* what);

// Called by all threads of the cluster. Arriving does not block; wait before arriving again.
void arrive_at_cluster(const Place& place);
void wait_for_cluster(const Place& place);
// Maps `at` in the block's shared memory to that of the cluster's block `rank`.
void* map_shared_rank(void* at, unsigned rank);
// The rank of the block that owns this shared memory.
unsigned shared_rank(const void* at);

// The block's memory for the declaration `key`; filled with NaN when the block starts.
void* shared_variable(const void* key, const char* name, std::size_t bytes, std::size_t alignment);

// The launch's dynamic shared memory, also filled with NaN.
void* dynamic_shared();

struct Argument {
    const void* at;
    std::size_t bytes;
};
struct Launch {
    const char* kernel = "";
    const void* entry = nullptr;  // address of the kernel function
    dim3 grid, block;
    std::size_t shared_bytes = 0;  // dynamic
    unsigned cluster = 1;          // blocks per cluster, along x
    std::span<const Argument> arguments = {};
};
void run_grid(const Launch& launch, const std::function<void()>& body);
// Appends work to a stream.
void submit(Stream& stream, std::function<void()> work);

// Sets the order in which blocks and threads run. 0: by index; other seeds: random but
// reproducible, mixing depth-first runs of single warps with uniform picks.
void set_schedule(std::uint64_t seed);
// Launches run at most this many of their blocks, evenly spread, which makes their results useless;
// for inspecting kernels on large grids or, with 0, only the launches. Negative: all blocks.
void set_most_blocks(std::int64_t count);
bool runs_all_blocks();
// The number of multiprocessors that the emulated GPU reports, 4 by default; set it before creating
// a backend. No kernel's results depend on it.
void set_multiprocessors(int count);
// The number of device allocations so far, to verify that a step makes none.
std::int64_t allocation_count();
// The number of kernels run so far.
std::int64_t launch_count();
// The number of copies within and fills of device memory so far; in a graph each is a node between
// kernels.
std::int64_t copy_count();
// The number of times that the host has submitted work to a stream; a graph's launch counts once.
std::int64_t submission_count();

// Ends the launch with this report. For the checker. Takes ownership of the text, as the abandoned
// kernel cannot free it.
[[noreturn]] void report(std::string what);
bool in_kernel();

// The address ranges of device and shared memory.
struct Range {
    std::byte *begin, *end;
    bool contains(const void* at) const { return at >= begin && at < end; }
};
Range device_range();
Range shared_range();

// Events for the checker, the profiler and tests; no_listener ignores them.
struct Listener {
    virtual ~Listener() = default;
    virtual void launch_begins(const Launch& /*launch*/) {}
    // Called for one block, or for those of a cluster.
    virtual void blocks_begin() {}
    virtual void block_barrier(unsigned /*rank*/) {}
    // The running thread has arrived at a barrier of the cluster; and all threads have arrived.
    virtual void cluster_arrived() {}
    virtual void cluster_complete() {}
    virtual void cluster_waited() {}
    virtual void thread_ends() {}
    // All lanes of the cluster's warp `warp` have arrived at an operation or a warp barrier.
    virtual void warp_operation(unsigned /*warp*/, WarpOperation /*operation*/) {}
    // A thread arrives on behalf of its block at a counter shared by blocks.
    virtual void block_arrives(const void* /*count*/, bool /*last*/) {}
    virtual void blocks_end() {}
    virtual void launch_ends(std::int64_t /*blocks_run*/) {}
    virtual void shared_declared(void* /*at*/, std::size_t /*bytes*/) {}
    // An asynchronous copy to this destination has been issued but has not landed.
    virtual void copy_issued(void* /*to*/, std::size_t /*bytes*/) {}
    virtual void device_allocated(void* /*at*/, std::size_t /*bytes*/) {}
    virtual void device_released(void* /*at*/, std::size_t /*bytes*/) {}
    // A stream copied or filled device memory; source or destination is null if it is host memory.
    virtual void device_copied(void* /*to*/, const void* /*from*/, std::size_t /*bytes*/) {}
};
extern Listener no_listener;
extern Listener* listener;

}  // namespace emulator
}  // namespace simt
