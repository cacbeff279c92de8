// The implementations of a convolution, chosen by conv2d.cu: conv2d_tensor.cu in TF32 or 16 bits
// and for fused operations, if it supports the shape; otherwise, per direction, direct
// (conv2d_direct.cu) if a matrix product of few channels would reuse too little, and implicit GEMM
// (conv2d_gemm.cu) for all others. Direct and GEMM kernels require n > 0.
#pragma once

#include "kernels/cuda/ops.hpp"

namespace gyre::SIMT_NAMESPACE {

// Return null if unsupported. The first is for few input channels and a channels-last output
// (conv2d_first.cu).
std::unique_ptr<Op> make_first_conv(const Context& context, const Conv2dSpec& spec,
                                    const OpSizes& sizes, DataType type);
std::unique_ptr<Op> make_tensor_conv(const Context& context, const Conv2dSpec& spec,
                                     const OpSizes& sizes, DataType type);

}  // namespace gyre::SIMT_NAMESPACE

namespace gyre::SIMT_NAMESPACE::direct {

// Each can_ function returns whether the shape is supported. workspace_bytes: the size that
// backward_weights needs for up to n images.
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
