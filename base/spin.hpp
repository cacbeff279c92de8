// Waiting for another thread or process without sleeping.
#pragma once

namespace gyre {

// Called in each round of a loop that waits: the processor then leaves the units that it shares
// with a second hardware thread to that one.
inline void spin_pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

}  // namespace gyre
