// Notifications that AddressSanitizer needs from code that switches stacks and manages memory
// itself. Empty without it.
#pragma once

#include <cstddef>

#if defined(__SANITIZE_ADDRESS__)
#define GYRE_ASAN 1
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#else
#define GYRE_ASAN 0
#endif

namespace simt {

inline void poison([[maybe_unused]] void* at, [[maybe_unused]] std::size_t bytes) {
#if GYRE_ASAN
    __asan_poison_memory_region(at, bytes);
#endif
}
inline void unpoison([[maybe_unused]] void* at, [[maybe_unused]] std::size_t bytes) {
#if GYRE_ASAN
    __asan_unpoison_memory_region(at, bytes);
#endif
}

#if GYRE_ASAN
class SanitizerFiber {
 public:
    void set_stack(const void* bottom, std::size_t bytes) {
        bottom_ = bottom;
        bytes_ = bytes;
        fake_stack_ = nullptr;
    }
    void leave(const SanitizerFiber& to, bool for_good) {
        __sanitizer_start_switch_fiber(for_good ? nullptr : &fake_stack_, to.bottom_, to.bytes_);
    }
    void enter(SanitizerFiber& from) {
        __sanitizer_finish_switch_fiber(fake_stack_, &from.bottom_, &from.bytes_);
    }

 private:
    const void* bottom_ = nullptr;  // the host's is found out when it is first left
    std::size_t bytes_ = 0;
    void* fake_stack_ = nullptr;
};
#else
class SanitizerFiber {
 public:
    void set_stack(const void*, std::size_t) {}
    void leave(const SanitizerFiber&, bool) {}
    void enter(SanitizerFiber&) {}
};
#endif

}  // namespace simt
