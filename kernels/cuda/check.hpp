// Checked calls to the CUDA runtime.
#pragma once

#include <cuda_runtime_api.h>

namespace gyre::cuda {

// Throws Error (internal) if the call failed, naming expression, file, line, host and, if known,
// the remedy.
void check(cudaError_t result, const char* expression, const char* file, int line);
// The same for a kernel launch.
void check_launch(cudaError_t result, const char* kernel);

}  // namespace gyre::cuda

#define GYRE_CUDA_CHECK(call) ::gyre::cuda::check((call), #call, __FILE__, __LINE__)
