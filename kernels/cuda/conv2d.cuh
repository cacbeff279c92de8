// The implementations of a convolution: in TF32 or 16 bits, and fused with what follows,
// conv2d_tensor.cu where it can; else for each direction direct (conv2d_direct.cu) where few
// channels leave a matrix product too little to share, and implicit GEMM (conv2d_gemm.cu) for all
// others, which are for n > 0 images. conv2d.cu chooses.
#pragma once

#include "kernels/cuda/ops.hpp"

namespace gyre::SIMT_NAMESPACE {

// Null where they cannot. The first is for few input channels and a channels-last output
// (conv2d_first.cu).
std::unique_ptr<Op> make_first_conv(const Context& context, const Conv2dSpec& spec,
                                    const OpSizes& sizes, DataType type);
std::unique_ptr<Op> make_tensor_conv(const Context& context, const Conv2dSpec& spec,
                                     const OpSizes& sizes, DataType type);

}  // namespace gyre::SIMT_NAMESPACE

namespace gyre::SIMT_NAMESPACE::direct {

// Each returns whether it can compute this shape. workspace_bytes: what backward_weights needs for
// up to n images.
bool can_forward(const Conv2dShape& shape);
bool can_backward_data(const Conv2dShape& shape);
bool can_backward_weights(const Conv2dShape& shape);
std::size_t workspace_bytes(const Conv2dShape& shape, int n);

void forward(const Context& context, const Conv2dShape& shape, int n, const float* x,
             const float* w, const float* b, float* y);
void backward_data(const Context& context, const Conv2dShape& shape, int n, const float* dy,
                   const float* w, float* dx);
void backward_weights(const Context& context, const Conv2dShape& shape, int n, const float* x,
                      const float* dy, float* dw, float* db);

}  // namespace gyre::SIMT_NAMESPACE::direct

namespace gyre::SIMT_NAMESPACE::implicit_gemm {

void forward(const Context& context, const Conv2dShape& shape, int n, const float* x,
             const float* w, const float* b, float* y);
void backward_data(const Context& context, const Conv2dShape& shape, int n, const float* dy,
                   const float* w, float* dx);
void backward_weights(const Context& context, const Conv2dShape& shape, int n, const float* x,
                      const float* dy, float* dw, float* db);

}  // namespace gyre::SIMT_NAMESPACE::implicit_gemm
