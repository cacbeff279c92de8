// What of other threads' work is ordered before a thread's, in blocks and clusters of them.
//
// Ticks count barriers. An access is kept with the tick of the last one that its thread had passed,
// and, in clusters, with how often the thread had arrived at the cluster's barrier, of which two
// bits are enough: who has passed it s times, for the last time at tick t and before at t', follows
// all that was done before t', and of the rest what was done before the s-th arrival.
//
// Not seen: an access after its thread's arrival, ordered by a barrier of the block before another
// thread's arrival, is taken for unordered.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>

#include "kernels/emulation/emulator.hpp"

namespace gyre::emulated {

class ClusterClocks {
 public:
    // What an access is kept with.
    struct Stamp {
        std::uint32_t tick;
        std::uint16_t thread;  // in the cluster, and behind it the arrivals
    };
    static constexpr unsigned kThreadBits = 11;
    static_assert(emulator::kMostClusterThreads <= 1u << kThreadBits);
    static unsigned thread_of(std::uint16_t kept) { return kept & ((1u << kThreadBits) - 1u); }

    // The blocks begin.
    void begin() {
        begun_ = completed_ = next();
        barriers_.fill(begun_);
        fences_.fill(0);
        clustered_ = emulator::cluster_blocks > 1;
        if (clustered_) {
            threads_.fill({});
        }
    }
    void block_barrier(unsigned rank) {
        barriers_[rank] = next();
        const auto block = static_cast<unsigned>(emulator::block_extent.count());
        std::fill_n(fences_.begin() + rank * block / 32, block / 32, std::uint16_t{0});
        if (clustered_) {  // all have seen what one of them has
            Clock* const first = &threads_[rank * block];
            const Clock most =
                *std::max_element(first, first + block,
                                  [](const Clock& a, const Clock& b) { return a.seen < b.seen; });
            for (unsigned i = 0; i < block; ++i) {
                first[i].seen = most.seen;
                first[i].now = most.now;
                first[i].before = most.before;
            }
        }
    }
    void warp_barrier(unsigned warp) { ++fences_[warp]; }
    // How often the thread's warp has synchronised since its block's last barrier.
    std::uint16_t fence(unsigned id) const { return fences_[id / 32]; }
    void arrived() { ++threads_[emulator::thread->id].arrivals; }
    void complete() { completed_ = next(); }
    void waited() {
        Clock& clock = threads_[emulator::thread->id];
        if (clock.seen < clock.arrivals) {
            clock = {clock.arrivals, clock.arrivals, completed_, clock.now};
        }
    }

    bool clustered() const { return clustered_; }
    std::uint32_t now() const { return tick_; }
    std::uint32_t begun() const { return begun_; }
    // How often the running thread has passed, and has arrived at, the cluster's barrier.
    std::uint32_t seen() const { return threads_[emulator::thread->id].seen; }
    std::uint32_t arrivals() const { return threads_[emulator::thread->id].arrivals; }

    // For an access of the running thread.
    Stamp stamp() const {
        const unsigned id = emulator::thread->id;
        if (!clustered_) {
            return {barriers_[0], static_cast<std::uint16_t>(id)};
        }
        const Clock& clock = threads_[id];
        return {std::max(barriers_[emulator::thread->rank], clock.now),
                static_cast<std::uint16_t>(id | (clock.arrivals & 3u) << kThreadBits)};
    }
    // Whether no barrier, of block or cluster, orders what was kept so before what the running
    // thread does now.
    bool same_interval(const Stamp& kept) const {
        return clustered_ ? same_in_cluster(kept) : kept.tick == barriers_[0];
    }

 private:
    struct Clock {
        std::uint32_t arrivals = 0;
        std::uint32_t seen = 0;  // barriers of the cluster
        std::uint32_t now = 0,
                      before = 0;  // when the last of them was complete, and the one before
    };

    bool same_in_cluster(const Stamp& kept) const {
        const emulator::Thread& self = *emulator::thread;
        if (kept.tick < begun_) {
            return false;
        }
        const unsigned rank =
            thread_of(kept.thread) / static_cast<unsigned>(emulator::block_extent.count());
        if (rank == self.rank && kept.tick < barriers_[rank]) {
            return false;
        }
        const Clock& clock = threads_[self.id];
        const bool passed =
            clock.seen > 0 && (kept.tick < clock.before ||
                               (kept.thread >> kThreadBits & 3u) == ((clock.seen - 1) & 3u));
        return !passed;
    }
    std::uint32_t next() { return ++tick_; }

    std::uint32_t tick_ = 1, begun_ = 1, completed_ = 1;
    bool clustered_ = false;
    std::array<std::uint32_t, emulator::kMostCluster> barriers_{};
    std::array<std::uint16_t, emulator::kMostClusterThreads / 32> fences_{};
    std::array<Clock, emulator::kMostClusterThreads> threads_{};
};

// Accesses to other blocks' shared memory, of which the last of each block is known, and blocks
// that end.
class ClusterVisits {
 public:
    struct Visit {
        std::uint32_t arrivals = 0;  // of its thread, before it
        std::uint32_t pc = 0;
        unsigned thread = 0;
        bool made = false;
    };
    void visit(unsigned owner, std::uint32_t arrivals, std::uint32_t pc) {
        Visit& last = last_[owner][emulator::thread->rank];
        if (last.arrivals <= arrivals) {
            last = {arrivals, pc, emulator::thread->id, true};
        }
    }
    bool ended(unsigned rank) const { return ended_[rank] == emulator::block_extent.count(); }
    // The running thread ends, after so many barriers of the cluster. Where its block does, too:
    // what may still go on in the block's memory; else, or where nothing does, null.
    const Visit* thread_ends(std::uint32_t seen) {
        const unsigned rank = emulator::thread->rank;
        if (++ended_[rank] == emulator::block_extent.count()) {
            for (const Visit& visit : last_[rank]) {
                if (visit.made && visit.arrivals >= seen) {
                    return &visit;
                }
            }
        }
        return nullptr;
    }

 private:
    std::array<std::array<Visit, emulator::kMostCluster>, emulator::kMostCluster> last_{};
    std::array<std::size_t, emulator::kMostCluster> ended_{};
};

}  // namespace gyre::emulated
