// The layers that both gyre and the CUDA libraries implement, behind one interface, so that they
// can be tested, timed and chosen alike. Operands as in kernels/backend.hpp.
#pragma once

#include <memory>
#include <string>

#include "kernels/backend.hpp"
#include "kernels/cuda/kernels.hpp"

namespace gyre::SIMT_NAMESPACE {

class LayerKernels {
 public:
    virtual ~LayerKernels() = default;
    virtual std::string name() const = 0;

    // Reserves memory, and chooses algorithms, for batches of up to n images; see Backend.
    virtual void prepare_conv2d(const std::string& layer, const Conv2dShape& shape, int n) = 0;
    virtual void prepare_maxpool2d(const std::string& layer, const MaxPool2dShape& shape,
                                   int n) = 0;
    virtual void prepare_linear(const std::string& layer, const LinearShape& shape, int n) = 0;
    virtual std::string choices() const { return {}; }

    virtual void conv2d_forward(const Conv2dShape& shape, int n, const float* x, const float* w,
                                const float* b, float* y) = 0;
    virtual void conv2d_backward_data(const Conv2dShape& shape, int n, const float* dy,
                                      const float* w, float* dx) = 0;
    virtual void conv2d_backward_weights(const Conv2dShape& shape, int n, const float* x,
                                         const float* dy, float* dw, float* db) = 0;
    // A backward pass gets the argmax of a forward pass by the same implementation.
    virtual void maxpool2d_forward(const MaxPool2dShape& shape, int n, const float* x, float* y,
                                   std::uint8_t* argmax) = 0;
    virtual void maxpool2d_backward(const MaxPool2dShape& shape, int n, const float* x,
                                    const std::uint8_t* argmax, const float* dy, float* dx) = 0;
    virtual void linear_forward(const LinearShape& shape, int n, const float* x, const float* w,
                                const float* b, float* y) = 0;
    virtual void linear_backward_data(const LinearShape& shape, int n, const float* dy,
                                      const float* w, float* dx) = 0;
    virtual void linear_backward_weights(const LinearShape& shape, int n, const float* x,
                                         const float* dy, float* dw, float* db) = 0;
    virtual void cross_entropy(const CrossEntropyArgs& args, int n) = 0;
};

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
