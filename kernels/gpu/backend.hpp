// The GPU backend: gyre's own kernels or the libraries', on a real GPU or the emulated one.
#pragma once

#include <memory>
#include <string>

#include "kernels/ops/backend.hpp"

namespace gyre {

// The implementations that a GPU backend takes its kernels from: --kernels ours|cudnn|auto. The
// emulated GPU has no libraries, so there auto chooses among gyre's own kernels.
enum class KernelSet { ours, library, automatic };
struct GpuOptions {
    int device = 0;
    bool share = false;  // ranks share devices if there are fewer devices than ranks
    KernelSet kernels = KernelSet::ours;
    bool deterministic = false;  // libraries may only use deterministic algorithms
    bool tf32 = false;           // matrix products may round their operands to TF32
    std::string choices_file;    // automatic: keeps the timings between runs; empty: none
};

// From the two compilations of kernels/gpu/backend.cpp. Both throw Error (internal) if the GPU
// cannot be used, and (usage) if it does not have the requested kernels.
namespace cuda {
std::unique_ptr<Backend> make_gpu_backend(const GpuOptions& options);
}
namespace emulated {
std::unique_ptr<Backend> make_gpu_backend(const GpuOptions& options);
}

}  // namespace gyre
