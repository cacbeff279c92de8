#include "kernels/emulation/async_copies.hpp"

#include <fmt/format.h>

#include <cstdint>

#include "kernels/emulation/emulator.hpp"

namespace simt::emulator {

void issue_copy(const AsyncCopy& copy) {
    thread->copies.issue(copy);
    listener->copy_issued(copy.to, kCopyBytes);
}

void check_address(const void* at, bool shared, const char* what) {
    if (reinterpret_cast<std::uintptr_t>(at) % kCopyBytes != 0) {
        report(fmt::format("misaligned: {} of an address that is not a multiple of 16", what));
    }
    if (shared && !shared_range().contains(static_cast<const std::byte*>(at))) {
        report(fmt::format("{} of an address that is not in shared memory", what));
    }
    if (shared && shared_rank(at) != thread->rank) {
        report(fmt::format("{} of an address in another block's shared memory", what));
    }
}

}  // namespace simt::emulator
