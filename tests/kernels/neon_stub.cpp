// A stub for the emulator, which the cross-compiled test of the CPU kernels (neon.sh) leaves out.
#include "kernels/emulation/emulator.hpp"

namespace simt::emulator {

void set_schedule(std::uint64_t) {}

}  // namespace simt::emulator
