// Checks every access of the emulated kernels to device and shared memory.
//
// Reports races between the threads of a block and between blocks, accesses outside allocations and
// declared variables, use of released memory, uninitialised reads, misaligned accesses, and host
// code that touches device memory. Reports name the source line, and for a race those of both
// sides.
//
// Kernels are compiled with -fsanitize=thread,alignment but linked without the sanitizers'
// libraries: the checker defines the functions that the compiler calls at each access.
//
// Not detected: memcpy and memset of more than 16 bytes, which the compiler does not instrument;
// and, between single bytes of one 4-byte word, races with accesses before the latest.
#pragma once

namespace simt {

// Starts to check. Call it before the first allocation of emulated device memory. Does nothing in a
// program that is linked with the emulator alone.
#if defined(SIMT_CHECKER)
void enable_checker();
#else
inline void enable_checker() {}
#endif

}  // namespace simt
