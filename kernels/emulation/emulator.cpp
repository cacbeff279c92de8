#include "kernels/emulation/emulator.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstdio>
#include <cstring>
#include <numeric>
#include <random>
#include <utility>
#include <vector>

#include "kernels/base/error.hpp"
#include "kernels/cuda/runtime.hpp"
#include "kernels/emulation/fibers.hpp"
#include "kernels/emulation/place.hpp"
#include "kernels/emulation/sanitizer.hpp"
#include "kernels/emulation/warp.hpp"

namespace gyre::emulated::emulator {

Thread* thread = nullptr;
uint3 block_index;
dim3 block_extent, grid_extent;
Listener* listener = nullptr;

// What a thread waits for.
struct Lane : Thread {
    Fiber* fiber = nullptr;
    Place place;
    bool at_barrier = false;
    bool at_warp_operation = false;
    bool done = false;
};

namespace {

constexpr unsigned kMostThreads = 1024;
constexpr std::size_t kRedzone = 64;
constexpr std::size_t kSlack = 4096;  // beyond the shared memory, for redzones
constexpr std::uint64_t kAllLanes = 0xffffffffu;

struct Warp {
    std::uint32_t ready = 0;    // lanes that may run
    std::uint32_t arrived = 0;  // lanes that wait in a warp operation
    WarpOperation operation = WarpOperation::sync;
    WarpOperands operands{};
    Place place;
};

class Machine {
 public:
    Machine() {
        const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
        shared_ = static_cast<std::byte*>(map_memory(kMostSharedBytes + 2 * page));
        for (unsigned i = 0; i < kMostThreads; ++i) {
            lanes_[i].linear = i;
        }
    }

    // --- the host's side -------------------------------------------------------------------------
    void run_grid(const Launch& launch, const std::function<void()>& body) {
        ++launches;
        const char* const kernel = kernel_ = launch.kernel;
        const dim3 grid = launch.grid, block = launch.block;
        body_ = &body;
        threads_ = static_cast<unsigned>(block.count());
        report_.clear();
        if (block.count() == 0 || block.count() > kMostThreads || block.count() % kWarp != 0) {
            throw Error(ExitCode::internal,
                        fmt::format("kernel {}: blocks of {} threads; gyre's kernels need a "
                                    "multiple of 32, at most {}",
                                    kernel, block.count(), kMostThreads));
        }
        if (grid.count() == 0 || grid.x > 0x7fffffffu || grid.y > 0xffffu || grid.z > 0xffffu) {
            throw Error(ExitCode::internal,
                        fmt::format("kernel {}: a grid of {} x {} x {} blocks is not possible",
                                    kernel, grid.x, grid.y, grid.z));
        }
        grid_extent = grid;
        block_extent = block;
        for (unsigned i = 0; i < threads_; ++i) {
            lanes_[i].index = {i % block.x, i / block.x % block.y, i / block.x / block.y};
        }
        shared_used_ = declared_ = 0;
        dynamic_ = nullptr;
        variables_.clear();
        poison(shared_, kMostSharedBytes + kSlack);
        if (listener != nullptr) {
            listener->launch_begins(launch);
        }
        if (launch.shared_bytes > 0) {
            if (launch.shared_bytes > kMostSharedBytes) {
                throw Error(
                    ExitCode::internal,
                    fmt::format("kernel {}: {} bytes of dynamic shared memory; there are {}",
                                kernel, launch.shared_bytes, kMostSharedBytes));
            }
            declared_ = launch.shared_bytes;
            dynamic_ = add_variable(this, launch.shared_bytes, 128);
        }
        order_.resize(grid.count());
        std::iota(order_.begin(), order_.end(), std::size_t{0});
        if (seed_ != 0) {
            std::shuffle(order_.begin(), order_.end(), random_);
        }
        const auto run =
            most_blocks_ < 0 ? order_.size() : std::min(order_.size(), std::size_t(most_blocks_));
        for (std::size_t nth = 0; nth < run; ++nth) {
            const std::size_t i = order_[nth * order_.size() / run];
            block_index = {static_cast<unsigned>(i % grid.x),
                           static_cast<unsigned>(i / grid.x % grid.y),
                           static_cast<unsigned>(i / grid.x / grid.y)};
            run_block();
            if (!report_.empty()) {
                throw Error(ExitCode::internal, report_);
            }
        }
        body_ = nullptr;
        if (listener != nullptr) {
            listener->launch_ends(static_cast<std::int64_t>(run));
        }
    }

    void set_most_blocks(std::int64_t count) { most_blocks_ = count; }
    void set_schedule(std::uint64_t seed) {
        seed_ = seed;
        random_.seed(seed);
    }

    bool in_kernel() const {
        return fibers_.running != nullptr && fibers_.running != &fibers_.host;
    }
    Range shared() const { return {shared_, shared_ + kMostSharedBytes + kSlack}; }

    // --- the threads' side -----------------------------------------------------------------------
    void sync_block(const Place& place) {
        Lane& lane = *fibers_.running->lane;
        if (done_ > 0) {
            report(
                fmt::format("the barrier at {} is reached after {} of {} threads have left the "
                            "kernel",
                            place, done_, threads_));
        }
        if (at_barrier_ == 0) {
            barrier_ = place;
        } else if (!same(barrier_, place)) {
            report(fmt::format("divergent barrier: this thread waits at {}, others at {}", place,
                               barrier_));
        }
        lane.place = place;
        lane.at_barrier = true;
        if (++at_barrier_ == threads_) {
            at_barrier_ = 0;
            for (unsigned i = 0; i < threads_; ++i) {
                lanes_[i].at_barrier = false;
            }
            all_ready();
            if (listener != nullptr) {
                listener->block_barrier();
            }
        }
        give_way(lane);
    }

    void warp_operation(WarpOperation operation, void* operand, const Place& place) {
        Lane& lane = *fibers_.running->lane;
        Warp& warp = warps_[lane.linear / kWarp];
        if (warp.arrived == 0) {
            warp.operation = operation;
            warp.place = place;
        } else if (warp.operation != operation || !same(warp.place, place)) {
            report(fmt::format("divergent warp operation: this lane is at {}, others at {}", place,
                               warp.place));
        }
        lane.place = place;
        warp.operands[lane.linear % kWarp] = operand;
        lane.at_warp_operation = true;
        warp.arrived |= 1u << (lane.linear % kWarp);
        if (warp.arrived == kAllLanes) {
            Lane* lanes = &lanes_[lane.linear / kWarp * kWarp];
            compute(operation, warp.operands);
            for (unsigned i = 0; i < kWarp; ++i) {
                lanes[i].at_warp_operation = false;
            }
            warp.arrived = 0;
            warp.ready = kAllLanes;
            if (listener != nullptr) {
                listener->warp_operation(lane.linear / kWarp, operation);
            }
        }
        give_way(lane);
    }

    void* shared_variable(const void* key, const char* name, std::size_t bytes,
                          std::size_t alignment) {
        for (const Variable& variable : variables_) {
            if (variable.key == key) {
                return variable.at;
            }
        }
        declared_ += bytes;
        const std::size_t most = dynamic_ == nullptr ? kSharedBytesUnasked : kMostSharedBytes;
        if (void* at = declared_ <= most ? add_variable(key, bytes, alignment) : nullptr) {
            return at;
        }
        report(fmt::format("shared memory '{}': with it the kernel needs {} bytes, but has {}",
                           name, declared_, most));
    }
    void* dynamic_shared() {
        if (dynamic_ == nullptr) {
            report("this kernel uses dynamic shared memory, of which its launch has none");
        }
        return dynamic_;
    }

    [[noreturn]] void report(std::string what) {
        if (!in_kernel()) {
            throw Error(ExitCode::internal, "emulated GPU: host code: " + what);
        }
        const Lane& lane = *fibers_.running->lane;
        report_ =
            fmt::format("emulated GPU: kernel {}, block ({}, {}, {}), thread ({}, {}, {}): {}",
                        kernel_, block_index.x, block_index.y, block_index.z, lane.index.x,
                        lane.index.y, lane.index.z, what);
        std::string().swap(what);  // nobody comes back to free it
        Fiber& from = *fibers_.running;
        jump(from, fibers_.host, true);
        std::abort();  // the host never comes back to an abandoned fiber
    }

 private:
    struct Variable {
        const void* key;
        void* at;
        std::size_t bytes;
    };

    // Null: there is no more room.
    void* add_variable(const void* key, std::size_t bytes, std::size_t alignment) {
        const std::size_t align = std::max<std::size_t>(alignment, 16);
        const std::size_t begin = (shared_used_ + kRedzone + align - 1) / align * align;
        if (begin + bytes + kRedzone > kMostSharedBytes + kSlack) {
            return nullptr;
        }
        shared_used_ = begin + bytes;
        void* at = shared_ + begin;
        unpoison(at, bytes);
        std::memset(at, 0xff, bytes);  // NaN
        variables_.push_back({key, at, bytes});
        if (listener != nullptr) {
            listener->shared_declared(at, bytes);
        }
        return at;
    }

    void all_ready() {
        for (unsigned w = 0; w < threads_ / kWarp; ++w) {
            warps_[w].ready = kAllLanes;
        }
    }

    void run_block() {
        for (const Variable& variable : variables_) {
            std::memset(variable.at, 0xff, variable.bytes);
        }
        for (unsigned i = 0; i < threads_; ++i) {
            Lane& lane = lanes_[i];
            lane.fiber = nullptr;
            lane.at_barrier = lane.at_warp_operation = lane.done = false;
            lane.copies.clear();
            lane.landing = false;
        }
        for (unsigned w = 0; w < threads_ / kWarp; ++w) {
            warps_[w].arrived = 0;
        }
        all_ready();
        at_barrier_ = done_ = 0;
        warp_now_ = 0;
        if (seed_ != 0) {
            // Uniform picks alone seldom let one warp run far ahead of the others.
            uniform_ = random_() % 4 == 0;
            warp_order_.resize(threads_ / kWarp);
            std::iota(warp_order_.begin(), warp_order_.end(), 0u);
            std::shuffle(warp_order_.begin(), warp_order_.end(), random_);
        }
        if (listener != nullptr) {
            listener->block_begins();
        }
        fibers_.running = &fibers_.host;
        Lane* first = pick();
        Fiber& fiber = fibers_.take();
        fiber.lane = first;
        jump(fibers_.host, fiber, false);
        fibers_.running = nullptr;
        if (!report_.empty()) {
            fibers_.abandon_all();
        } else if (listener != nullptr) {
            listener->block_ends();
        }
    }

    // The next thread to run, taken from the ready ones; null where there is none.
    Lane* pick() {
        const unsigned warps = threads_ / kWarp;
        if (seed_ == 0) {
            for (unsigned i = 0; i < warps; ++i) {
                const unsigned w = warp_now_ + i < warps ? warp_now_ + i : warp_now_ + i - warps;
                if (warps_[w].ready != 0) {
                    warp_now_ = w;
                    return take(w, static_cast<unsigned>(std::countr_zero(warps_[w].ready)));
                }
            }
            return nullptr;
        }
        const unsigned start = uniform_ ? static_cast<unsigned>(random_() % warps) : 0;
        for (unsigned i = 0; i < warps; ++i) {
            const unsigned w = warp_order_[(start + i) % warps];
            const std::uint32_t ready = warps_[w].ready;
            if (ready != 0) {
                const int turn = static_cast<int>(random_() % kWarp);
                const int lane = (std::countr_zero(std::rotr(ready, turn)) + turn) % 32;
                return take(w, static_cast<unsigned>(lane));
            }
        }
        return nullptr;
    }
    Lane* take(unsigned warp, unsigned lane) {
        warps_[warp].ready &= ~(1u << lane);
        return &lanes_[warp * kWarp + lane];
    }

    // Called by a thread that waits, possibly not any more.
    void give_way(Lane& lane) {
        Lane* next = pick();
        if (next == nullptr) {
            report_deadlock();
        }
        if (next == &lane) {
            return;
        }
        Fiber& self = *fibers_.running;
        Fiber* target = next->fiber;
        if (target == nullptr) {
            target = &fibers_.take();
            target->lane = next;
        }
        jump(self, *target, false);
    }

    [[noreturn]] void report_deadlock() {
        std::string text = "no thread can go on:";
        int listed = 0;
        for (unsigned i = 0; i < threads_ && listed < 4; ++i) {
            const Lane& lane = lanes_[i];
            if (lane.at_barrier || lane.at_warp_operation) {
                text += fmt::format(" thread {} waits in a {} at {};", i,
                                    lane.at_barrier ? "barrier" : "warp operation", lane.place);
                ++listed;
            }
        }
        text += fmt::format(" {} of {} threads have left", done_, threads_);
        report(std::move(text));
    }

    // The loop of a fiber: runs one thread after another, as long as they do not wait.
    static void fiber_main(context::transfer_t from) {
        Machine& machine = instance();
        machine.fibers_.arrived(from);
        Fiber& self = *machine.fibers_.running;
        for (;;) {
            Lane& lane = *self.lane;
            lane.fiber = &self;
            thread = &lane;
            (*machine.body_)();
            machine.finished(lane);
            Lane* next = machine.pick();
            if (next != nullptr && next->fiber == nullptr) {
                self.lane = next;
                continue;
            }
            if (next == nullptr && machine.done_ < machine.threads_) {
                machine.report_deadlock();
            }
            machine.fibers_.give_back(self);
            machine.jump(self, next == nullptr ? machine.fibers_.host : *next->fiber, false);
        }
    }

    void finished(Lane& lane) {
        lane.done = true;
        lane.fiber = nullptr;
        ++done_;
        if (lane.copies.under_way() > 0) {
            report(
                fmt::format("this thread leaves the kernel with {} asynchronous copies that it "
                            "has not waited for",
                            lane.copies.under_way()));
        }
        if (at_barrier_ > 0) {
            report(
                fmt::format("this thread leaves the kernel while {} others wait in the barrier "
                            "at {}",
                            at_barrier_, barrier_));
        }
        const Warp& warp = warps_[lane.linear / kWarp];
        if (warp.arrived != 0) {
            report(
                fmt::format("this thread leaves the kernel while others of its warp wait in the "
                            "warp operation at {}",
                            warp.place));
        }
    }

    void jump(Fiber& from, Fiber& to, bool for_good) {
        fibers_.jump(from, to, for_good);
        thread = fibers_.running->lane;
    }

 public:
    std::int64_t launches = 0;
    static Machine& instance() {
        // Never destroyed: other statics may still hold emulated memory at exit.
        static Machine* machine = new Machine;
        return *machine;
    }

 private:
    const char* kernel_ = "";
    const std::function<void()>* body_ = nullptr;
    unsigned threads_ = 0, at_barrier_ = 0, done_ = 0, warp_now_ = 0;
    Place barrier_;
    std::array<Lane, kMostThreads> lanes_;
    std::array<Warp, kMostThreads / kWarp> warps_;
    Fibers fibers_{fiber_main};
    std::string report_;
    std::byte* shared_ = nullptr;
    std::size_t shared_used_ = 0, declared_ = 0;
    void* dynamic_ = nullptr;
    std::vector<Variable> variables_;
    std::uint64_t seed_ = 0;
    std::int64_t most_blocks_ = -1;
    std::mt19937_64 random_;
    bool uniform_ = false;
    std::vector<unsigned> warp_order_;
    std::vector<std::size_t> order_;
};

}  // namespace

void sync_block(const Place& place) {
    Machine::instance().sync_block(place);
}
void sync_warp(const Place& place) {
    Machine::instance().warp_operation(WarpOperation::sync, nullptr, place);
}
void warp_operation(WarpOperation operation, void* operand, const Place& place) {
    Machine::instance().warp_operation(operation, operand, place);
}
void atomic_max(std::int32_t* at, std::int32_t value) {
    *at = std::max(*at, value);
}

void* shared_variable(const void* key, const char* name, std::size_t bytes, std::size_t alignment) {
    return Machine::instance().shared_variable(key, name, bytes, alignment);
}
void* dynamic_shared() {
    return Machine::instance().dynamic_shared();
}
void run_grid(const Launch& launch, const std::function<void()>& body) {
    Machine::instance().run_grid(launch, body);
}
void set_schedule(std::uint64_t seed) {
    Machine::instance().set_schedule(seed);
}
void set_most_blocks(std::int64_t count) {
    Machine::instance().set_most_blocks(count);
}
std::int64_t launch_count() {
    return Machine::instance().launches;
}
void report(std::string what) {
    Machine::instance().report(std::move(what));
}
bool in_kernel() {
    return Machine::instance().in_kernel();
}
Range shared_range() {
    return Machine::instance().shared();
}

}  // namespace gyre::emulated::emulator
