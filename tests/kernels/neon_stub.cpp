// Stubs for what the cross-compiled test of the CPU kernels (neon.sh) leaves out: the emulator, and
// files of weights.
#include <cstdlib>

#include "kernels/emulation/emulator.hpp"
#include "train/checkpoint.hpp"

namespace simt::emulator {

void set_schedule(std::uint64_t) {}

}  // namespace simt::emulator

namespace gyre::train {

TensorFile read_weights(const std::filesystem::path&) {
    std::abort();
}

}  // namespace gyre::train
