#include "kernels/emulation/shared_memory.hpp"

#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "kernels/emulation/fibers.hpp"
#include "kernels/emulation/runtime.hpp"
#include "kernels/emulation/sanitizer.hpp"

namespace simt::emulator {
namespace {

constexpr std::size_t kRedzone = 64;
constexpr std::size_t kSlack = 4096;  // beyond the shared memory limit, for redzones

}  // namespace

SharedMemory::SharedMemory() {
    const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
    pitch_ = (kMostSharedBytes + kSlack + page - 1) / page * page;
    memory_ = static_cast<std::byte*>(map_memory(kMostCluster * pitch_));
}

void SharedMemory::begin_launch(unsigned blocks) {
    poison(memory_, std::max(blocks, blocks_) * pitch_);
    blocks_ = blocks;
    used_ = 0;
    variables_.clear();
}

void SharedMemory::begin_blocks() {
    for (unsigned rank = 0; rank < blocks_; ++rank) {
        for (const Variable& variable : variables_) {
            std::memset(of(rank) + variable.at, 0xff, variable.bytes);
        }
    }
}

void* SharedMemory::find(unsigned rank, const void* key) const {
    for (const Variable& variable : variables_) {
        if (variable.key == key) {
            return of(rank) + variable.at;
        }
    }
    return nullptr;
}

void* SharedMemory::variable(unsigned rank, const void* key, std::size_t bytes,
                             std::size_t alignment) {
    const std::size_t align = std::max<std::size_t>(alignment, 16);
    const std::size_t begin = (used_ + kRedzone + align - 1) / align * align;
    if (begin + bytes + kRedzone > kMostSharedBytes + kSlack) {
        return nullptr;
    }
    used_ = begin + bytes;
    variables_.push_back({key, begin, bytes});
    for (unsigned each = 0; each < blocks_; ++each) {
        void* at = of(each) + begin;
        unpoison(at, bytes);
        std::memset(at, 0xff, bytes);  // NaN
        listener->shared_declared(at, bytes);
    }
    return of(rank) + begin;
}

void* SharedMemory::of_rank(void* at, unsigned rank) const {
    return of(rank) + offset(at) % pitch_;
}

unsigned SharedMemory::rank_of(const void* at) const {
    return static_cast<unsigned>(offset(at) / pitch_);
}

}  // namespace simt::emulator
