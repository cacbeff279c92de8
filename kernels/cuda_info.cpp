// The versions of CUDA and cuDNN compiled with and found at run time, and the GPUs.
//
// cuDNN is loaded with dlopen, so that the program starts without it.
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <fmt/format.h>

#include "kernels/device_info.hpp"
#include "kernels/make_backend.hpp"
#if __has_include(<cudnn_version.h>)
#include <cudnn_version.h>
#endif

namespace gyre {
namespace {

std::string cuda_version_text(int version) {
    return version == 0 ? "none" : fmt::format("{}.{}", version / 1000, version % 1000 / 10);
}

// A function of a shared library, or null. The library stays loaded.
template <typename Function>
Function* find_function(const char* library, const char* name) {
    void* handle = dlopen(library, RTLD_NOW | RTLD_LOCAL);
    return handle ? reinterpret_cast<Function*>(dlsym(handle, name)) : nullptr;
}

InfoLine cudnn_line() {
    std::string built = "none";
#if defined(CUDNN_MAJOR)
    built = fmt::format("{}.{}.{}", CUDNN_MAJOR, CUDNN_MINOR, CUDNN_PATCHLEVEL);
#endif
    std::string found = "none";
    if (const auto version = find_function<std::size_t()>("libcudnn.so.9", "cudnnGetVersion")) {
        const std::size_t v = version();
        found = fmt::format("{}.{}.{}", v / 10000, v / 100 % 100, v % 100);
    }
    return {"cuDNN", fmt::format("compiled in: {}, found: {}", built, found)};
}

}  // namespace

std::vector<InfoLine> cuda_info() {
    int driver = 0, runtime = 0, count = 0;
    // A missing driver is not an error here: the line reports it.
    if (cudaDriverGetVersion(&driver) != cudaSuccess) {
        driver = 0;
    }
    if (cudaRuntimeGetVersion(&runtime) != cudaSuccess) {
        runtime = 0;
    }
    std::vector<InfoLine> lines = {
        {"CUDA", fmt::format("compiled in: {}, driver for: {}", cuda_version_text(runtime),
                             cuda_version_text(driver))},
        cudnn_line()};
    const cudaError_t result = cudaGetDeviceCount(&count);
    if (result != cudaSuccess || count == 0) {
        lines.push_back(
            {"GPU", fmt::format("none usable ({})",
                                result == cudaSuccess ? "no device" : cudaGetErrorString(result))});
    }
    for (int i = 0; result == cudaSuccess && i < count; ++i) {
        cudaDeviceProp properties{};
        const cudaError_t known = cudaGetDeviceProperties(&properties, i);
        lines.push_back({fmt::format("GPU {}", i),
                         known == cudaSuccess
                             ? fmt::format("{}, sm_{}{}, {} MiB", properties.name, properties.major,
                                           properties.minor, properties.totalGlobalMem >> 20)
                             : cudaGetErrorString(known)});
    }
    return lines;
}

int cuda_device_count() {
    int count = 0;
    return cudaGetDeviceCount(&count) == cudaSuccess ? count : 0;
}

}  // namespace gyre
