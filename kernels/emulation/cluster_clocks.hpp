// Happens-before tracking between the threads of blocks and clusters.
//
// Ticks count barriers. An access is stored with the tick of the last barrier that its thread had
// passed and, in clusters, with the number of the thread's arrivals at the cluster's barrier,
// modulo 4. That is enough: a thread that has passed this barrier s times, most recently at tick t
// and before that at t', is ordered after all accesses before t', and after later ones made before
// their thread's s-th arrival.
//
// Limitation: an access after its thread's arrival that a barrier of the block orders before
// another thread's arrival is considered unordered.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>

#include "kernels/emulation/emulator.hpp"

namespace simt {

class ClusterClocks {
 public:
    // The time of an access.
    struct Stamp {
        std::uint32_t tick;
        std::uint16_t thread;  // index in the cluster; the upper bits count arrivals
    };
    static constexpr unsigned kThreadBits = 11;
    static_assert(emulator::kMostClusterThreads <= 1u << kThreadBits);
    static unsigned thread_of(std::uint16_t kept) { return kept & ((1u << kThreadBits) - 1u); }

    // Called when the blocks begin.
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
        if (clustered_) {  // now all threads know what one of them knew
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
    // The number of warp synchronisations since the block's last barrier.
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
    // How many times the running thread has passed, and arrived at, the cluster's barrier.
    std::uint32_t seen() const { return threads_[emulator::thread->id].seen; }
    std::uint32_t arrivals() const { return threads_[emulator::thread->id].arrivals; }

    // The stamp of an access by the running thread.
    Stamp stamp() const {
        const unsigned id = emulator::thread->id;
        if (!clustered_) {
            return {barriers_[0], static_cast<std::uint16_t>(id)};
        }
        const Clock& clock = threads_[id];
        return {std::max(barriers_[emulator::thread->rank], clock.now),
                static_cast<std::uint16_t>(id | (clock.arrivals & 3u) << kThreadBits)};
    }
    // True if no barrier of block or cluster orders the stamped access before the running thread's
    // current one.
    bool same_interval(const Stamp& kept) const {
        return clustered_ ? same_in_cluster(kept) : kept.tick == barriers_[0];
    }

 private:
    struct Clock {
        std::uint32_t arrivals = 0;
        std::uint32_t seen = 0;             // completed barriers of the cluster
        std::uint32_t now = 0, before = 0;  // ticks at which the last two of them completed
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

// Tracks accesses to other blocks' shared memory (each block's latest) and blocks that have ended.
class ClusterVisits {
 public:
    struct Visit {
        std::uint32_t arrivals = 0;  // of its thread before the access
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
    // The running thread ends after `seen` barriers of the cluster. If its block ends with it,
    // returns an access to the block's memory that may still be in progress; otherwise, or if there
    // is none, null.
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

}  // namespace simt
