// Runs kernels on the CPU, a fiber for each CUDA thread, and reports what is wrong with them.
//
// The blocks of a grid run one after another; the threads of a block take turns, and change only
// where a barrier or a warp operation makes them wait. Whatever order a schedule picks is one the
// GPU might pick as well, so a kernel must give the same result under all of them. Reports:
//   always: divergent barriers and warp operations, threads that leave while others wait, blocks
//     whose size is no multiple of 32, too much shared memory;
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

struct Thread {
    uint3 index;
    unsigned linear = 0;
    AsyncCopies copies;
    bool landing = false;  // copies land: no accesses of the kernel's own
};
extern Thread* thread;  // the one that runs
extern uint3 block_index;
extern dim3 block_extent, grid_extent;

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

// An asynchronous copy by the thread that runs, which has filled `to` with NaN, and lands what
// thread->copies.land() hands it, so that the checker sees both.
void issue_copy(const AsyncCopy& copy);

// Reports an address that is no multiple of 16, or `shared` and not in shared memory. Of `what`.
void check_address(const void* at, bool shared, const char* what);

// Memory of the block for the declaration `key`; filled with NaN when the block starts.
void* shared_variable(const void* key, const char* name, std::size_t bytes, std::size_t alignment);

// The launch's dynamic shared memory, likewise.
void* dynamic_shared();

struct Launch {
    const char* kernel = "";
    const void* entry = nullptr;  // the function
    dim3 grid, block;
    std::size_t shared_bytes = 0;  // dynamic
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
    virtual void block_begins() {}
    virtual void block_barrier() {}
    // All lanes of the warp have arrived; barriers of warps are such an operation, too.
    virtual void warp_operation(unsigned /*warp*/, WarpOperation /*operation*/) {}
    virtual void block_ends() {}
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
