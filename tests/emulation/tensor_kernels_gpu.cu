// The same kernels for a GPU. A separate file, because CMake gives a file one language per folder,
// here C++.
#include "tests/emulation/tensor_kernels.cu"

namespace gyre::cuda {

bool has_tensor_kernels() {
    cudaFuncAttributes attributes{};
    const cudaError_t found = cudaFuncGetAttributes(&attributes, fragments_kernel);
    if (found != cudaErrorNoKernelImageForDevice && found != cudaErrorInvalidDeviceFunction) {
        return true;
    }
    static_cast<void>(cudaGetLastError());  // clear it, so that later calls do not report it
    return false;
}

}  // namespace gyre::cuda
