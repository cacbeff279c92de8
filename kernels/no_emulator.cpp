// In place of the emulator, where a build leaves it out (GYRE_EMULATION).
#include "kernels/backend.hpp"
#include "kernels/base/error.hpp"

namespace gyre {

std::unique_ptr<Backend> make_emulated_backend(const GpuOptions&) {
    throw usage_error(
        "`device` emulated: this build has no emulator, as scripts/train.sh leaves it out to start "
        "sooner; scripts/test.sh builds it");
}

}  // namespace gyre
