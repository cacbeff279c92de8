// The backends that this build has.
#pragma once

#include <memory>

#include "kernels/gpu/backend.hpp"

namespace gyre {

// threads: workers inside this process, >= 1.
std::unique_ptr<Backend> make_cpu_backend(int threads);
// Throws Error (usage) if this build has no CUDA, or (internal) if the GPU cannot be used.
std::unique_ptr<Backend> make_cuda_backend(const GpuOptions& options);
// gyre's own CUDA kernels, run on the CPU (kernels/emulation/emulator.hpp). Throws Error (usage) if
// this build has no emulator.
std::unique_ptr<Backend> make_emulated_backend(const GpuOptions& options);
// The number of GPUs that the CUDA backend can use; 0 without a driver, a GPU or a CUDA build.
int cuda_device_count();

}  // namespace gyre
