#include "kernels/emulation/emulator.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <numeric>
#include <utility>
#include <vector>

#include "base/error.hpp"
#include "kernels/emulation/lanes.hpp"
#include "kernels/emulation/runtime.hpp"
#include "kernels/emulation/schedule.hpp"
#include "kernels/emulation/shared_memory.hpp"

namespace simt::emulator {

Thread* thread = nullptr;
dim3 block_extent, grid_extent;
unsigned cluster_blocks = 1;
constinit Listener no_listener;
constinit Listener* listener = &no_listener;

namespace {

class Machine {
 public:
    // --- the host's side -------------------------------------------------------------------------
    void run_grid(const Launch& launch, const std::function<void()>& body) {
        ++launches;
        kernel_ = launch.kernel;
        body_ = &body;
        report_.clear();
        check_extents(launch);
        const dim3 grid = grid_extent = launch.grid, block = block_extent = launch.block;
        cluster_blocks = launch.cluster;
        block_threads_ = static_cast<unsigned>(block.count());
        threads_ = block_threads_ * launch.cluster;
        for (unsigned id = 0; id < threads_; ++id) {
            const unsigned i = id % block_threads_;
            Lane& lane = lanes_[id];
            lane.index = {i % block.x, i / block.x % block.y, i / block.x / block.y};
            lane.linear = i;
            lane.rank = id / block_threads_;
            lane.id = id;
        }
        declared_ = launch.shared_bytes;
        dynamic_ = false;
        shared_.begin_launch(launch.cluster);
        listener->launch_begins(launch);
        if (launch.shared_bytes > 0) {
            shared_.variable(0, this, launch.shared_bytes, 128);
            dynamic_ = true;
        }
        order_.resize(grid.count() / launch.cluster);
        std::iota(order_.begin(), order_.end(), std::size_t{0});
        schedule_.shuffle(order_);
        const auto most = static_cast<std::size_t>(most_blocks_);
        const auto run = most_blocks_ < 0 ? order_.size()
                                          : std::min(order_.size(),
                                                     (most + launch.cluster - 1) / launch.cluster);
        for (std::size_t nth = 0; nth < run; ++nth) {
            const std::size_t first = order_[nth * order_.size() / run] * launch.cluster;
            for (unsigned id = 0; id < threads_; ++id) {
                const std::size_t i = first + lanes_[id].rank;
                lanes_[id].block = {static_cast<unsigned>(i % grid.x),
                                    static_cast<unsigned>(i / grid.x % grid.y),
                                    static_cast<unsigned>(i / grid.x / grid.y)};
            }
            run_blocks();
            if (!report_.empty()) {
                throw gyre::Error(gyre::ExitCode::internal, report_);
            }
        }
        body_ = nullptr;
        listener->launch_ends(static_cast<std::int64_t>(run * launch.cluster));
    }

    void set_most_blocks(std::int64_t count) { most_blocks_ = count; }
    bool runs_all_blocks() const { return most_blocks_ < 0; }
    void set_schedule(std::uint64_t seed) { schedule_ = Schedule(seed); }

    bool in_kernel() const {
        return fibers_.running != nullptr && fibers_.running != &fibers_.host;
    }
    const SharedMemory& shared() const { return shared_; }

    // --- the threads' side -----------------------------------------------------------------------
    void sync_block(const Place& place) {
        Lane& lane = running();
        Barrier& barrier = barriers_[lane.rank];
        if (std::string wrong = barrier.come("barrier", place, block_threads_); !wrong.empty()) {
            report(std::move(wrong));
        }
        lane.place = place;
        lane.at_barrier = true;
        if (barrier.waiting == block_threads_) {
            barrier.waiting = 0;
            Lane* const lanes = &lanes_[lane.id - lane.linear];
            for (unsigned i = 0; i < block_threads_; ++i) {
                lanes[i].at_barrier = false;
                make_ready(lanes[i]);
            }
            listener->block_barrier(lane.rank);
        }
        give_way(lane);
    }

    void arrive_at_cluster(const Place& place) {
        Lane& lane = running();
        if (lane.arrived) {
            report(
                fmt::format("this thread arrives at the cluster's barrier at {} but has not "
                            "waited since its arrival at {}",
                            place, lane.place));
        }
        if (std::string wrong = cluster_.come("cluster barrier", place, threads_); !wrong.empty()) {
            report(std::move(wrong));
        }
        lane.place = place;
        lane.arrived = true;
        lane.arrival = completed_;
        listener->cluster_arrived();
        if (cluster_.waiting == threads_) {
            cluster_.waiting = 0;
            ++completed_;
            for (unsigned i = 0; i < threads_; ++i) {
                if (std::exchange(lanes_[i].at_cluster, false)) {
                    make_ready(lanes_[i]);
                }
            }
            listener->cluster_complete();
        }
    }
    void wait_for_cluster(const Place& place) {
        Lane& lane = running();
        if (!lane.arrived) {
            report(
                fmt::format("this thread waits at {} for the cluster's barrier, at which it has "
                            "not arrived",
                            place));
        }
        lane.place = place;
        if (lane.arrival == completed_) {
            lane.at_cluster = true;
        } else {
            make_ready(lane);
        }
        give_way(lane);
        lane.arrived = false;
        listener->cluster_waited();
    }
    void* map_shared_rank(void* at, unsigned rank) {
        if (rank >= cluster_blocks) {
            report(fmt::format("map_shared_rank: rank {} of a cluster of {} blocks", rank,
                               cluster_blocks));
        }
        if (!shared_.range().contains(static_cast<std::byte*>(at))) {
            report("map_shared_rank: an address that is not in shared memory");
        }
        return shared_.of_rank(at, rank);
    }

    void warp_operation(WarpOperation operation, void* operand, const Place& place) {
        Lane& lane = running();
        Warp& warp = warps_[lane.id / kWarp];
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
            Lane* lanes = &lanes_[lane.id / kWarp * kWarp];
            compute(operation, warp.operands);
            for (unsigned i = 0; i < kWarp; ++i) {
                lanes[i].at_warp_operation = false;
                make_ready(lanes[i]);
            }
            warp.arrived = 0;
            listener->warp_operation(lane.id / kWarp, operation);
        }
        give_way(lane);
    }

    void* shared_variable(const void* key, const char* name, std::size_t bytes,
                          std::size_t alignment) {
        const unsigned rank = running().rank;
        if (void* at = shared_.find(rank, key)) {
            return at;
        }
        declared_ += bytes;
        const std::size_t most = dynamic_ ? kMostSharedBytes : kSharedBytesUnasked;
        if (void* at =
                declared_ <= most ? shared_.variable(rank, key, bytes, alignment) : nullptr) {
            return at;
        }
        report(fmt::format("shared memory '{}': with it the kernel needs {} bytes, but has {}",
                           name, declared_, most));
    }
    void* dynamic_shared() {
        if (!dynamic_) {
            report("this kernel uses dynamic shared memory, but its launch has none");
        }
        return shared_.find(running().rank, this);
    }

    [[noreturn]] void report(std::string what) {
        if (!in_kernel()) {
            throw gyre::Error(gyre::ExitCode::internal, "emulated GPU: host code: " + what);
        }
        const Lane& lane = running();
        report_ =
            fmt::format("emulated GPU: kernel {}, block ({}, {}, {}), thread ({}, {}, {}): {}",
                        kernel_, lane.block.x, lane.block.y, lane.block.z, lane.index.x,
                        lane.index.y, lane.index.z, what);
        std::string().swap(what);  // this function never returns to free it
        Fiber& from = *fibers_.running;
        jump(from, fibers_.host, true);
        std::abort();  // the host never resumes an abandoned fiber
    }

 private:
    Lane& running() { return *fibers_.running->lane; }
    void make_ready(const Lane& lane) { schedule_.make_ready(lane.id); }

    void run_blocks() {
        shared_.begin_blocks();
        for (unsigned i = 0; i < threads_; ++i) {
            Lane& lane = lanes_[i];
            lane.fiber = nullptr;
            lane.at_barrier = lane.at_warp_operation = lane.done = false;
            lane.at_cluster = lane.arrived = false;
            lane.copies.clear();
            lane.landing = false;
        }
        for (Warp& warp : warps_) {
            warp.arrived = 0;
        }
        barriers_.fill({});
        cluster_ = {};
        completed_ = 0;
        schedule_.begin(threads_ / kWarp);
        listener->blocks_begin();
        fibers_.running = &fibers_.host;
        Lane* first = pick();
        Fiber& fiber = fibers_.take();
        fiber.lane = first;
        jump(fibers_.host, fiber, false);
        fibers_.running = nullptr;
        if (!report_.empty()) {
            fibers_.abandon_all();
        } else {
            listener->blocks_end();
        }
    }

    // The next thread to run; null if none is ready.
    Lane* pick() {
        const int id = schedule_.pick();
        return id < 0 ? nullptr : &lanes_[static_cast<unsigned>(id)];
    }

    // Called by a thread that waits, or whose wait has just ended.
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
        std::string text = "deadlock: no thread can continue:";
        int listed = 0;
        for (unsigned i = 0; i < threads_ && listed < 4; ++i) {
            const Lane& lane = lanes_[i];
            if (lane.at_barrier || lane.at_warp_operation || lane.at_cluster) {
                text += fmt::format(" thread {} waits in a {} at {};", i,
                                    lane.at_barrier   ? "barrier"
                                    : lane.at_cluster ? "cluster barrier"
                                                      : "warp operation",
                                    lane.place);
                ++listed;
            }
        }
        text += fmt::format(" {} of {} threads have left", cluster_.done, threads_);
        report(std::move(text));
    }

    // A fiber's loop: runs one thread after another, as long as they do not wait.
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
            if (next == nullptr && machine.cluster_.done < machine.threads_) {
                machine.report_deadlock();
            }
            machine.fibers_.give_back(self);
            machine.jump(self, next == nullptr ? machine.fibers_.host : *next->fiber, false);
        }
    }

    void finished(Lane& lane) {
        lane.done = true;
        lane.fiber = nullptr;
        const Barrier& barrier = barriers_[lane.rank];
        ++barriers_[lane.rank].done;
        ++cluster_.done;
        if (lane.copies.under_way() > 0) {
            report(
                fmt::format("this thread leaves the kernel with {} asynchronous copies that it "
                            "has not waited for",
                            lane.copies.under_way()));
        }
        if (barrier.waiting > 0) {
            report(
                fmt::format("this thread leaves the kernel while {} others wait in the barrier "
                            "at {}",
                            barrier.waiting, barrier.place));
        }
        if (lane.arrived) {
            report(
                fmt::format("this thread leaves the kernel without a wait for the cluster's "
                            "barrier at which it has arrived at {}",
                            lane.place));
        }
        if (cluster_.waiting > 0) {
            report(
                fmt::format("this thread leaves the kernel while {} others are at the cluster "
                            "barrier at {}",
                            cluster_.waiting, cluster_.place));
        }
        const Warp& warp = warps_[lane.id / kWarp];
        if (warp.arrived != 0) {
            report(
                fmt::format("this thread leaves the kernel while others of its warp wait in the "
                            "warp operation at {}",
                            warp.place));
        }
        listener->thread_ends();
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
    unsigned block_threads_ = 0;
    unsigned threads_ = 0;  // of the cluster
    std::array<Barrier, kMostCluster> barriers_;
    Barrier cluster_;
    unsigned completed_ = 0;  // completed barriers of the cluster
    std::array<Lane, kMostClusterThreads> lanes_;
    std::array<Warp, kMostClusterThreads / kWarp> warps_;
    Fibers fibers_{fiber_main};
    std::string report_;
    SharedMemory shared_;
    std::size_t declared_ = 0;
    bool dynamic_ = false;
    Schedule schedule_{0};
    std::int64_t most_blocks_ = -1;
    std::vector<std::size_t> order_;
};

}  // namespace

void sync_block(const Place& place) {
    Machine::instance().sync_block(place);
}
void sync_warp(const Place& place) {
    Machine::instance().warp_operation(WarpOperation::sync, nullptr, place);
}
void arrive_at_cluster(const Place& place) {
    Machine::instance().arrive_at_cluster(place);
}
void wait_for_cluster(const Place& place) {
    Machine::instance().wait_for_cluster(place);
}
void* map_shared_rank(void* at, unsigned rank) {
    return Machine::instance().map_shared_rank(at, rank);
}
unsigned shared_rank(const void* at) {
    return Machine::instance().shared().rank_of(at);
}
void warp_operation(WarpOperation operation, void* operand, const Place& place) {
    Machine::instance().warp_operation(operation, operand, place);
}
bool runs_all_blocks() {
    return Machine::instance().runs_all_blocks();
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
    return Machine::instance().shared().range();
}

}  // namespace simt::emulator
