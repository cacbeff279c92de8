// Watches every access of the emulated kernels to device and shared memory.
//
// Reports races between the threads of a block and between blocks, accesses outside allocations and
// declared variables, use of released memory, reads of what nobody wrote, misaligned accesses, and
// host code that touches device memory. Each names the source line, a race those of both sides.
//
// Kernels are compiled with -fsanitize=thread,alignment but linked without these sanitizers'
// libraries: the checker defines the functions that the compiler calls at each access.
//
// Not seen: memcpy and memset of more than 16 bytes, which the compiler does not mark; between
// single bytes of one 4-byte word only the races with the latest access.
#pragma once

namespace gyre::emulated {

// From now on. Call it before the first allocation of emulated device memory.
void enable_checker();

}  // namespace gyre::emulated
