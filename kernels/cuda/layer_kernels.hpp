// The implementations of the layers (LayerKernels in kernels/layer_backend.hpp) that a GPU backend
// has: gyre's own, the CUDA libraries', and the faster of both. A backward pass of max-pooling gets
// the argmax of a forward pass by the same implementation.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "kernels/cuda/kernels.hpp"
#include "kernels/layer_backend.hpp"

namespace gyre::SIMT_NAMESPACE {

// The kernels of kernels/cuda/kernels.hpp.
std::unique_ptr<LayerKernels> make_own_kernels(const Context& context);

#if !defined(GYRE_EMULATED)
// cuDNN and cuBLAS, found at run time. Throws Error (usage) naming the library that is missing.
std::unique_ptr<LayerKernels> make_library_kernels(const Context& context,
                                                   const GpuOptions& options);
#endif
// For each layer, direction and announced number of images the faster of both, timed in a graph as
// the layer is prepared; timings are read from and added to options.choices_file, under the name of
// the GPU. In training, max-pooling is timed as forward and backward together.
std::unique_ptr<LayerKernels> make_automatic_kernels(const Context& context,
                                                     const GpuOptions& options,
                                                     const std::string& gpu,
                                                     std::unique_ptr<LayerKernels> own,
                                                     std::unique_ptr<LayerKernels> library);

// Device memory of finite values that are not alike, in [-1, 1), to time kernels on: the clock of a
// GPU depends on how many bits change. Its end waits for the GPU.
class TimingOperand {
 public:
    TimingOperand(Stream& stream, std::int64_t elems);
    ~TimingOperand() { release(memory_); }
    TimingOperand(const TimingOperand&) = delete;
    TimingOperand& operator=(const TimingOperand&) = delete;

    float* get() const { return memory_; }

 private:
    float* const memory_;
};

}  // namespace gyre::SIMT_NAMESPACE
