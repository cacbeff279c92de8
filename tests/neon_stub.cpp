// In the place of the backends that a cross-compiled test of the CPU's kernels does without
// (neon.sh).
#include "kernels/backend.hpp"
#include "kernels/base/error.hpp"
#include "kernels/emulation/emulator.hpp"

namespace gyre {

std::unique_ptr<Backend> make_emulated_backend(const GpuOptions&) {
    throw usage_error("built without the emulator");
}
std::unique_ptr<Backend> make_cuda_backend(const GpuOptions&) {
    throw usage_error("built without CUDA");
}
int cuda_device_count() {
    return 0;
}
namespace emulated::emulator {
void set_schedule(std::uint64_t) {}
}  // namespace emulated::emulator

}  // namespace gyre
