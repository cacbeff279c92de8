// Chooses the faster of gyre's own kernels and the libraries' for each part of an operation.
#pragma once

#include <memory>
#include <string>

#include "kernels/cuda/ops.hpp"
#include "kernels/gpu/backend.hpp"

namespace gyre::SIMT_NAMESPACE {

// The faster of both for each direction and listed number of images, timed in a graph when the
// operation is created; timings are read from and added to options.choices_file, under the GPU's
// name. Max-pooling and batch normalisation are chosen as a whole, since only its own backward pass
// can read what a forward pass saved. What the library lacks runs on gyre's own kernels.
std::unique_ptr<KernelFactory> make_auto_factory(const Context& context, const GpuOptions& options,
                                                 const std::string& gpu,
                                                 std::unique_ptr<KernelFactory> own,
                                                 std::unique_ptr<KernelFactory> library);

}  // namespace gyre::SIMT_NAMESPACE
