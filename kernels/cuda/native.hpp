// The CUDA runtime's own handle of a stream, for library calls and launches.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/cuda/runtime.hpp"

namespace gyre::cuda {

cudaStream_t native(Stream& stream);

}  // namespace gyre::cuda
