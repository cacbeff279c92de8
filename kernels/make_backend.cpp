#include "kernels/make_backend.hpp"

#include "base/error.hpp"
#include "kernels/choose_cpu_kernels.hpp"

namespace gyre {

std::unique_ptr<Backend> make_cpu_backend(int threads) {
    return make_cpu_backend(chosen_cpu_kernels(), threads);
}

#if defined(GYRE_HAVE_CUDA)
std::unique_ptr<Backend> make_cuda_backend(const GpuOptions& options) {
    return cuda::make_gpu_backend(options);
}
#else
std::unique_ptr<Backend> make_cuda_backend(const GpuOptions&) {
    throw usage_error(
        "`device` cuda: this build of gyre has no CUDA; build it with a CUDA toolkit "
        "(-DGYRE_CUDA=ON reports what is missing), or use `device` cpu");
}
int cuda_device_count() {
    return 0;
}
#endif

#if defined(GYRE_HAVE_EMULATION)
std::unique_ptr<Backend> make_emulated_backend(const GpuOptions& options) {
    return emulated::make_gpu_backend(options);
}
#else
std::unique_ptr<Backend> make_emulated_backend(const GpuOptions&) {
    throw usage_error(
        "`device` emulated: this build has no emulator, because scripts/train.sh leaves it out to "
        "start sooner; scripts/test.sh builds it");
}
#endif

}  // namespace gyre
