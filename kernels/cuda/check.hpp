// Checked calls of the CUDA runtime.
#pragma once

#include <cuda_runtime_api.h>

namespace gyre::cuda {

// Throws Error (internal) unless the call succeeded, naming expression, file, line, host, and the
// remedy where one is known.
void check(cudaError_t result, const char* expression, const char* file, int line);
// The same for the start of a kernel.
void check_launch(cudaError_t result, const char* kernel);

}  // namespace gyre::cuda

#define GYRE_CUDA_CHECK(call) ::gyre::cuda::check((call), #call, __FILE__, __LINE__)
