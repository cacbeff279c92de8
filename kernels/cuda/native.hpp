// The CUDA runtime's native stream handle, for library calls and launches.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/cuda/runtime.hpp"

namespace gyre::cuda {

cudaStream_t native(Stream& stream);

}  // namespace gyre::cuda
