#include "comm/shared/shared_memory.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <climits>
#include <cstring>
#include <limits>
#include <new>
#include <string>

#include "base/clock.hpp"
#include "base/descriptor.hpp"
#include "base/round_up.hpp"
#include "base/spin.hpp"
#include "comm/launch/secret.hpp"

namespace gyre::comm {
namespace {

constexpr std::size_t kTokenBytes = 32;
constexpr std::size_t kPageBytes = 4096;

std::size_t header_bytes(int ranks) {
    const std::size_t bytes = 64 * (1 + static_cast<std::size_t>(ranks));
    return round_up(kTokenBytes + bytes, kPageBytes);
}

}  // namespace

// The counters are lock-free atomics, which work between processes.
struct alignas(64) SharedMemory::Header {
    char token[kTokenBytes];  // by which ranks know that they have mapped the same memory
    std::atomic<std::uint32_t> news;
    std::atomic<std::uint32_t> sleepers;
};
struct alignas(64) SharedMemory::Counts {
    std::atomic<std::uint64_t> of[3];  // by Count
};
static_assert(std::atomic<std::uint64_t>::is_always_lock_free &&
              std::atomic<std::uint32_t>::is_always_lock_free);

std::unique_ptr<SharedMemory> SharedMemory::make(Communicator& comm) {
    const std::size_t bytes =
        header_bytes(comm.size()) + static_cast<std::size_t>(comm.size()) * kSlots * kSlotBytes;
    Descriptor file;
    std::string path, token(kTokenBytes, '\0');
    if (comm.is_root()) {
        file = Descriptor(memfd_create("gyre", MFD_CLOEXEC));
        if (file.open() && ftruncate(file.fd(), static_cast<off_t>(bytes)) == 0) {
            path = fmt::format("/proc/{}/fd/{}", getpid(), file.fd());
        }
        token = random_bytes(kTokenBytes);
    }
    path = broadcast_string(comm, path, 0);
    token = broadcast_string(comm, token, 0);
    if (!comm.is_root() && !path.empty()) {
        // In a container of its own, a rank may find another process's file there, or none.
        file = Descriptor(::open(path.c_str(), O_RDWR | O_CLOEXEC | O_NONBLOCK | O_NOCTTY));
    }
    std::unique_ptr<SharedMemory> shared;
    struct stat found = {};
    if (file.open() && !path.empty() && fstat(file.fd(), &found) == 0 && S_ISREG(found.st_mode) &&
        found.st_size == static_cast<off_t>(bytes)) {
        void* const at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file.fd(), 0);
        if (at != MAP_FAILED) {
            shared.reset(
                new SharedMemory(static_cast<std::byte*>(at), bytes, comm.rank(), comm.size()));
        }
    }
    if (comm.is_root() && shared != nullptr) {
        std::memcpy(shared->header().token, token.data(), kTokenBytes);
    }
    comm.barrier();
    const bool same =
        shared != nullptr && std::memcmp(shared->header().token, token.data(), kTokenBytes) == 0;
    double failed = same ? 0.0 : 1.0;
    comm.allreduce_sum({&failed, 1});
    return failed == 0.0 ? std::move(shared) : nullptr;
}

SharedMemory::SharedMemory(std::byte* memory, std::size_t bytes, int rank, int ranks)
    : memory_(memory), bytes_(bytes), rank_(rank), ranks_(ranks) {}

SharedMemory::~SharedMemory() {
    munmap(memory_, bytes_);
}

// The memory begins as zeros, which is what the atomics begin with.
SharedMemory::Header& SharedMemory::header() const {
    return *std::launder(reinterpret_cast<Header*>(memory_));
}

SharedMemory::Counts& SharedMemory::counts(int rank) const {
    return *std::launder(reinterpret_cast<Counts*>(memory_ + sizeof(Header)) + rank);
}

std::byte* SharedMemory::slot(int rank, std::uint64_t piece) const {
    const auto number = static_cast<std::uint64_t>(rank) * kSlots + piece % kSlots;
    return memory_ + header_bytes(ranks_) + number * kSlotBytes;
}

void SharedMemory::publish(Count count, std::uint64_t pieces) {
    counts(rank_).of[count].store(pieces, std::memory_order_release);
    // Whoever is about to sleep says so before it looks at the news for the last time.
    header().news.fetch_add(1);
    if (header().sleepers.load() > 0) {
        syscall(SYS_futex, &header().news, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
    }
}

std::uint64_t SharedMemory::least(Count count) const {
    std::uint64_t least = std::numeric_limits<std::uint64_t>::max();
    for (int rank = 0; rank < ranks_; ++rank) {
        least = std::min(least, counts(rank).of[count].load(std::memory_order_acquire));
    }
    return least;
}

std::uint32_t SharedMemory::news() const {
    return header().news.load();
}

void SharedMemory::wait_for_news(std::uint32_t seen, std::chrono::microseconds spin) const {
    constexpr int kLooks = 64;  // between two looks at the clock
    const auto begin = Clock::now();
    do {
        for (int i = 0; i < kLooks; ++i) {
            if (news() != seen) {
                return;
            }
            spin_pause();
        }
    } while (Clock::now() - begin < spin);
    const timespec most{.tv_sec = 0, .tv_nsec = 100'000'000};
    header().sleepers.fetch_add(1);
    syscall(SYS_futex, &header().news, FUTEX_WAIT, seen, &most, nullptr, 0);
    header().sleepers.fetch_sub(1);
}

}  // namespace gyre::comm
