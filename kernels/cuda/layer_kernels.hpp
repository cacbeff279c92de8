// The implementations of the layers (LayerKernels in kernels/backend.hpp) that a GPU backend has:
// gyre's own, the CUDA libraries', and the faster of both. A backward pass of max-pooling gets the
// argmax of a forward pass by the same implementation.
#pragma once

#include <memory>

#include "kernels/backend.hpp"
#include "kernels/cuda/kernels.hpp"

namespace gyre::SIMT_NAMESPACE {

// The kernels of kernels/cuda/kernels.hpp.
std::unique_ptr<LayerKernels> make_own_kernels(const Context& context);

#if !defined(GYRE_EMULATED)
// cuDNN and cuBLAS, found at run time. Throws Error (usage) naming the library that is missing.
std::unique_ptr<LayerKernels> make_library_kernels(const Context& context,
                                                   const GpuOptions& options);
// For each layer and direction the faster of both, timed as the layer is prepared; timings are read
// from and added to options.choices_file. Max-pooling is timed as forward and backward together.
std::unique_ptr<LayerKernels> make_automatic_kernels(const Context& context,
                                                     const GpuOptions& options,
                                                     std::unique_ptr<LayerKernels> own,
                                                     std::unique_ptr<LayerKernels> library);
#endif

}  // namespace gyre::SIMT_NAMESPACE
