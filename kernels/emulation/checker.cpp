#include "kernels/emulation/checker.hpp"

#include <fmt/format.h>
#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>
#include <type_traits>
#include <vector>

#include "base/error.hpp"
#include "kernels/emulation/cluster_clocks.hpp"
#include "kernels/emulation/emulator.hpp"
#include "kernels/emulation/finished_blocks.hpp"
#include "kernels/emulation/places.hpp"

namespace simt {
namespace {

constexpr unsigned kNone = 0xfff;  // no thread

struct Access {
    std::uint32_t epoch;   // tick of its ClusterClocks::Stamp; 0: never
    std::uint32_t pc;      // offset in the program
    std::uint16_t thread;  // of its stamp
    std::uint16_t fence;   // warp synchronisations so far in this epoch
};

// The state of 4 bytes of memory. Masks have one bit per byte.
struct Cell {
    Access write, read;
    std::uint16_t other : 12;        // another reader, from another warp if there is one
    std::uint16_t foreign_mask : 4;  // bytes read by other blocks before `read`
    std::uint8_t write_mask : 4, read_mask : 4;
    std::uint8_t live : 4, known : 4;  // allocated or declared; written
    std::uint32_t foreign_epoch;       // when these were read
};
static_assert(sizeof(Cell) == 32 && std::is_trivial_v<Cell>);

// Empty until enable_checker(), so that it contains no address. Shared memory has additional cells
// for each rank's reads of other blocks' memory; device memory has one set of cells for all, with
// two readers each.
struct Region {
    std::uintptr_t begin = 0;
    std::size_t bytes = 0;
    Cell* cells = nullptr;
    bool shared = false;

    bool contains(std::uintptr_t at) const { return at - begin < bytes; }
    Cell& cell(std::uintptr_t at) const { return cells[(at - begin) / 4]; }
    Cell& foreign_reads(const Cell& cell, unsigned rank) const {
        return cells[static_cast<std::size_t>(&cell - cells) + (rank + 1) * (bytes / 4)];
    }
};
constinit Region device, shared;
constinit std::uintptr_t code_begin = 0;  // program_begin()

constinit ClusterClocks clocks;
constinit std::uint32_t launch_start = 1;  // in ticks of `clocks`

constinit ClusterVisits visits;

std::map<std::uintptr_t, std::size_t> allocations, released, variables;

FinishedBlocks finished;

// Calls f(cell, mask) for the words of a range.
template <typename F>
void each_word(const Region& region, const void* begin, std::size_t bytes, F f) {
    auto at = reinterpret_cast<std::uintptr_t>(begin);
    while (bytes > 0) {
        const std::size_t here = std::min(bytes, 4 - at % 4);
        f(region.cell(at), ((1u << here) - 1u) << at % 4);
        at += here;
        bytes -= here;
    }
}

// --- words for reports ---------------------------------------------------------------------------

std::string behind_at(std::uint32_t pc) {
    return pc == 0 ? "" : " at " + place_of(pc);
}

unsigned rank_of(unsigned thread) {
    return thread / static_cast<unsigned>(emulator::block_extent.count());
}
std::string name_of(unsigned thread) {
    const unsigned x = emulator::block_extent.x, y = emulator::block_extent.y;
    const unsigned i = thread % static_cast<unsigned>(emulator::block_extent.count());
    return fmt::format("thread ({}, {}, {}) of {}", i % x, i / x % y, i / x / y,
                       rank_of(thread) == emulator::thread->rank
                           ? "the same block"
                           : fmt::format("the cluster's block {}", rank_of(thread)));
}

// Describes an address: within a range, or by the distance to the nearest one.
std::string location(const Region& region, std::uintptr_t at) {
    const auto before = [at](const auto& ranges) {
        const auto next = ranges.upper_bound(at);
        return next == ranges.begin() ? ranges.end() : std::prev(next);
    };
    const char* kind = region.shared ? "a shared variable" : "device memory";
    if (!region.shared) {
        const auto old = before(released);
        if (old != released.end() && at - old->first < old->second) {
            return fmt::format("at offset {} of released device memory of {} bytes",
                               at - old->first, old->second);
        }
    }
    const auto& ranges = region.shared ? variables : allocations;
    const auto last = before(ranges), next = ranges.upper_bound(at);
    const std::size_t offset = last == ranges.end() ? SIZE_MAX : at - last->first;
    if (last != ranges.end() && offset < last->second) {
        return fmt::format("at offset {} of {} of {} bytes", offset, kind, last->second);
    }
    if (next != ranges.end() &&
        (last == ranges.end() || next->first - at < offset - last->second)) {
        return fmt::format("{} bytes before {} of {} bytes", next->first - at, kind, next->second);
    }
    return last == ranges.end()
               ? std::string("where nothing was allocated or declared")
               : fmt::format("{} bytes behind the end of {} of {} bytes (offset {})",
                             offset - last->second, kind, last->second, offset);
}

// The access passed on by the hooks; only used in reports.
struct What {
    const Region& region;
    std::uintptr_t at;
    std::size_t bytes;
    bool write;
    std::uint32_t pc;
    bool visit = false;  // an access to another block's shared memory

    std::string text() const {
        return fmt::format("this thread {} {} byte{} at {}", write ? "writes" : "reads", bytes,
                           bytes == 1 ? "" : "s", place_of(pc));
    }
};

// The compiler assumes that the hooks do not throw, so host code cannot be left with an Error.
[[noreturn]] void end_program(const std::string& what) {
    std::fprintf(stderr, "emulated GPU: %s\n", what.c_str());
    std::abort();
}
[[noreturn, gnu::noinline, gnu::cold]] void report_host(const What& what) {
    end_program(fmt::format("host code touches device memory: it {} {} bytes at {}",
                            what.write ? "writes" : "reads", what.bytes, place_of(what.pc)));
}
[[noreturn, gnu::noinline, gnu::cold]] void report_outside(const What& what) {
    emulator::report(
        fmt::format("out of bounds: {}, {}", what.text(), location(what.region, what.at)));
}
[[noreturn, gnu::noinline, gnu::cold]] void report_unknown(const What& what) {
    emulator::report(fmt::format("uninitialised: {} that {} has written, {}", what.text(),
                                 what.region.shared ? "no thread of the block and no asynchronous "
                                                      "copy that was waited for"
                                                    : "nothing",
                                 location(what.region, what.at)));
}
[[noreturn, gnu::noinline, gnu::cold]] void report_race(const What& what, unsigned thread,
                                                        std::uint32_t pc, bool wrote) {
    const bool warp = thread / 32 == emulator::thread->id / 32;
    const bool block = rank_of(thread) == emulator::thread->rank;
    emulator::report(fmt::format("race: {}; {} {} them{}, with no barrier{} between ({})",
                                 what.text(), name_of(thread), wrote ? "wrote" : "read",
                                 behind_at(pc),
                                 warp     ? " or __syncwarp"
                                 : !block ? " of the cluster"
                                          : "",
                                 location(what.region, what.at)));
}
[[noreturn, gnu::noinline, gnu::cold]] void report_visit(const What& what, const char* why) {
    emulator::report(fmt::format("another block's shared memory: {}, {} ({})", what.text(), why,
                                 location(what.region, what.at)));
}
[[noreturn, gnu::noinline, gnu::cold]] void report_block_race(const What& what, bool wrote,
                                                              std::uint32_t pc) {
    emulator::report(fmt::format(
        "race between blocks: {}; another block of the launch {} them{}, and blocks run in any "
        "order ({})",
        what.text(), wrote ? "wrote" : "read", behind_at(pc), location(what.region, what.at)));
}

// --- the rules -----------------------------------------------------------------------------------

// True if an access at tick `when` was made by a block of this launch that is not running now, and
// is not known to be ordered before this one.
bool other_block(const Region& region, std::uint32_t when) {
    return !region.shared && when >= launch_start && when < clocks.begun() &&
           !finished.known(when, clocks.stamp().tick, emulator::thread->linear);
}

bool same_interval(const Access& access) {
    return clocks.same_interval({access.epoch, access.thread});
}

// True if an access by `thread` in this interval is unordered with the running thread's.
bool unordered(unsigned thread, const Access& access) {
    const unsigned self = emulator::thread->id;
    return thread != self && (thread / 32 != self / 32 || access.fence == clocks.fence(self));
}

Access access_now(const What& what) {
    const ClusterClocks::Stamp stamp = clocks.stamp();
    return {stamp.tick, what.pc, stamp.thread, clocks.fence(emulator::thread->id)};
}

[[gnu::always_inline]] inline void check_write(const Cell& cell, unsigned mask, const What& what) {
    if ((cell.write_mask & mask) == 0) {
        return;
    }
    if (other_block(what.region, cell.write.epoch)) {
        report_block_race(what, true, cell.write.pc);
    }
    if (same_interval(cell.write)) {
        const unsigned thread = ClusterClocks::thread_of(cell.write.thread);
        if (unordered(thread, cell.write)) {
            report_race(what, thread, cell.write.pc, true);
        }
    }
}

void read_word(Cell& written, unsigned mask, const What& what) {
    const bool fresh = what.region.shared && written.write.epoch < clocks.begun();
    if ((mask & (fresh ? 0u : written.known)) != mask) {
        report_unknown(what);
    }
    check_write(written, mask, what);

    // Keep one reader, and a second one that a __syncwarp cannot order together with the first.
    const unsigned self = emulator::thread->id;
    Cell& cell = what.visit ? what.region.foreign_reads(written, emulator::thread->rank) : written;
    Access& read = cell.read;
    const unsigned reader = ClusterClocks::thread_of(read.thread);
    const bool same_warp = reader / 32 == self / 32;
    const bool same_fence = read.fence == clocks.fence(self);
    bool replace = true;
    if (!same_interval(read)) {
        if (other_block(what.region, read.epoch)) {
            const unsigned before = cell.foreign_epoch >= launch_start ? cell.foreign_mask : 0u;
            cell.foreign_mask = (before | cell.read_mask) & 15u;
            cell.foreign_epoch = read.epoch;
        }
    } else if (self == reader && cell.other == kNone && same_fence) {
        cell.read_mask = (cell.read_mask | mask) & 15u;
        replace = false;
    } else if ((cell.read_mask & mask) == 0) {
    } else if (cell.other != kNone && cell.other / 32 != reader / 32) {
        replace = false;
    } else if (!same_warp || (same_fence && self != reader)) {
        cell.other = self & 0xfffu;
        cell.read_mask = cell.read_mask & mask & 15u;
        replace = false;
    } else {
        replace = !same_fence;
    }
    if (replace) {
        read = access_now(what);
        cell.read_mask = mask & 15u;
        cell.other = kNone;
    }
}

void check_reads(const Cell& cell, unsigned mask, const What& what) {
    const Access& read = cell.read;
    if ((cell.read_mask & mask) == 0) {
        return;
    }
    if (other_block(what.region, read.epoch)) {
        report_block_race(what, false, read.pc);
    }
    if (same_interval(read)) {
        if (const unsigned thread = ClusterClocks::thread_of(read.thread);
            unordered(thread, read)) {
            report_race(what, thread, read.pc, false);
        }
        if (cell.other != kNone && unordered(cell.other, read)) {
            report_race(what, cell.other, 0, false);
        }
    }
}

void write_word(Cell& cell, unsigned mask, const What& what) {
    check_write(cell, mask, what);
    if ((cell.foreign_mask & mask) != 0 && other_block(what.region, cell.foreign_epoch)) {
        report_block_race(what, false, 0);
    }
    check_reads(cell, mask, what);
    if (what.region.shared && clocks.clustered()) {
        for (unsigned rank = 0; rank < emulator::cluster_blocks; ++rank) {
            check_reads(what.region.foreign_reads(cell, rank), mask, what);
        }
    }
    const bool fresh = what.region.shared && cell.write.epoch < clocks.begun();
    cell.known = ((fresh ? 0u : cell.known) | mask) & 15u;
    cell.write = access_now(what);
    cell.write_mask = mask & 15u;
}

// Checks an access to another block of the cluster, which must have begun and not ended.
void visit(const What& what, unsigned owner) {
    if (clocks.seen() == 0) {
        report_visit(what, "before a barrier of the cluster ensures that the block has begun");
    }
    if (visits.ended(owner)) {
        report_visit(what, "of a block that has ended");
    }
    visits.visit(owner, clocks.arrivals(), what.pc);
}

// kBytes: size of an aligned access (-fsanitize=alignment finds misaligned ones), or 0.
template <bool kWrite, std::size_t kBytes>
void check(const Region& region, std::uintptr_t at, std::size_t bytes, const void* pc) {
    What what{region, at, bytes, kWrite,
              static_cast<std::uint32_t>(reinterpret_cast<std::uintptr_t>(pc) - code_begin)};
    if (emulator::thread == nullptr) {
        report_host(what);
    }
    if (region.shared && clocks.clustered()) {
        const unsigned owner = emulator::shared_rank(reinterpret_cast<const void*>(at));
        what.visit = owner != emulator::thread->rank;
        if (what.visit) {
            visit(what, owner);
        }
    }
    const auto word = [&](Cell& cell, unsigned mask) {
        if ((mask & cell.live) != mask) {
            report_outside(what);
        }
        if constexpr (kWrite) {
            write_word(cell, mask, what);
        } else {
            read_word(cell, mask, what);
        }
    };
    if constexpr (kBytes == 0) {
        each_word(region, reinterpret_cast<const void*>(at), bytes, word);
    } else {
        if constexpr (kBytes < 4) {
            word(region.cell(at), ((1u << kBytes) - 1u) << at % 4);
        } else {
            for (std::size_t i = 0; i < kBytes; i += 4) {
                word(region.cell(at + i), 15u);
            }
        }
    }
}

template <bool kWrite, std::size_t kBytes>
[[gnu::always_inline]] inline void access(const void* at, const void* pc, std::size_t bytes) {
    const auto address = reinterpret_cast<std::uintptr_t>(at);
    if (device.contains(address)) {
        check<kWrite, kBytes>(device, address, bytes, pc);
    } else if (shared.contains(address)) {
        check<kWrite, kBytes>(shared, address, bytes, pc);
    }
}

void code_reached(const void*) {}

// --- what the emulator tells ---------------------------------------------------------------------

class Checker final : public emulator::Listener {
 public:
    void launch_begins(const emulator::Launch&) override {
        for (const auto& [at, bytes] : variables) {
            each_word(shared, reinterpret_cast<const void*>(at), bytes,
                      [](Cell& cell, unsigned) { cell = {}; });
        }
        variables.clear();
        launch_start = clocks.now() + 1;
        finished.begin_launch();
    }
    void blocks_begin() override {
        clocks.begin();
        finished.begin_block();
        if (clocks.clustered()) {
            visits = {};
        }
    }
    void block_barrier(unsigned rank) override { clocks.block_barrier(rank); }
    void block_arrives(const void* count, bool last) override {
        finished.arrives(count, last, clocks.begun(), clocks.stamp().tick,
                         emulator::thread->linear);
    }
    void cluster_arrived() override { clocks.arrived(); }
    void cluster_complete() override { clocks.complete(); }
    void cluster_waited() override { clocks.waited(); }
    void thread_ends() override {
        if (!clocks.clustered()) {
            return;
        }
        if (const ClusterVisits::Visit* visit = visits.thread_ends(clocks.seen())) {
            emulator::report(fmt::format(
                "another block's shared memory: this block ends, but no barrier of the cluster "
                "orders this after the access by {}{}",
                name_of(visit->thread), behind_at(visit->pc)));
        }
    }
    void warp_operation(unsigned warp, emulator::WarpOperation operation) override {
        if (operation == emulator::WarpOperation::sync) {
            clocks.warp_barrier(warp);
        }
    }
    void shared_declared(void* at, std::size_t bytes) override {
        variables[reinterpret_cast<std::uintptr_t>(at)] = bytes;
        make_live(shared, at, bytes);
    }
    void copy_issued(void* to, std::size_t bytes) override {
        each_word(shared, to, bytes, [](Cell& cell, unsigned) { cell.known = 0; });
    }
    void device_allocated(void* at, std::size_t bytes) override {
        const auto begin = reinterpret_cast<std::uintptr_t>(at);
        std::erase_if(released, [&](const auto& old) {
            return old.first < begin + bytes && begin < old.first + old.second;
        });
        allocations[begin] = bytes;
        make_live(device, at, bytes);
    }
    void device_released(void* at, std::size_t bytes) override {
        const auto begin = reinterpret_cast<std::uintptr_t>(at);
        allocations.erase(begin);
        released[begin] = bytes;
        each_word(device, at, bytes, [](Cell& cell, unsigned) { cell = {}; });
    }
    void device_copied(void* to, const void* from, std::size_t bytes) override {
        if (from != nullptr) {
            each_word(device, from, bytes, [&](Cell& cell, unsigned mask) {
                expect(cell.live, mask, "reads outside allocations", cell);
                if (to == nullptr) {
                    expect(cell.known, mask, "to the host reads what nobody wrote", cell);
                }
            });
        }
        if (to != nullptr) {
            each_word(device, to, bytes, [&](Cell& cell, unsigned mask) {
                expect(cell.live, mask, "writes outside allocations", cell);
                cell.known = (cell.known | mask) & 15u;
            });
        }
    }

 private:
    static void make_live(const Region& region, const void* at, std::size_t bytes) {
        each_word(region, at, bytes, [](Cell& cell, unsigned mask) {
            cell = {};
            cell.live = mask & 15u;
        });
    }
    static void expect(unsigned are, unsigned mask, const char* what, const Cell& cell) {
        if ((are & mask) != mask) {
            const auto word = static_cast<std::size_t>(&cell - device.cells);
            emulator::report(fmt::format("a copy or fill of a stream {}, {}", what,
                                         location(device, device.begin + word * 4)));
        }
    }
};

Region region_of(const emulator::Range& range, bool is_shared) {
    const auto bytes = static_cast<std::size_t>(range.end - range.begin);
    // Pages are allocated when touched. The extra one covers accesses that run past the end.
    const std::size_t sets = is_shared ? 1 + emulator::kMostCluster : 1;
    void* cells = mmap(nullptr, sets * (bytes / 4) * sizeof(Cell) + 4096, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (cells == MAP_FAILED) {
        throw gyre::Error(gyre::ExitCode::internal,
                          "the checker could not reserve addresses; is there a limit "
                          "(ulimit -v)?");
    }
    return {reinterpret_cast<std::uintptr_t>(range.begin), bytes, static_cast<Cell*>(cells),
            is_shared};
}

}  // namespace

void enable_checker() {
    if (emulator::listener != &emulator::no_listener) {
        return;
    }
    if (emulator::allocation_count() > 0) {
        throw gyre::Error(gyre::ExitCode::internal,
                          "enable_checker() must come before the first allocation");
    }
    code_begin = program_begin();
    static Checker checker;
    emulator::listener = &checker;
    device = region_of(emulator::device_range(), false);
    shared = region_of(emulator::shared_range(), true);
}

}  // namespace simt

#include "kernels/emulation/compiler_hooks.hpp"
