// The two implementations of a convolution: direct (conv2d_direct.cu) where few channels leave a
// matrix product too little to share, implicit GEMM (conv2d_gemm.cu) for all others. Both are for
// n > 0 images. conv2d.cu chooses.
#pragma once

#include "kernels/cuda/kernels.hpp"

namespace gyre::SIMT_NAMESPACE::direct {

// Each returns whether it can compute this shape. workspace_bytes: what backward_weights needs for
// up to n images.
bool can_forward(const Conv2dShape& shape);
bool can_backward_data(const Conv2dShape& shape);
bool can_backward_weights(const Conv2dShape& shape);
std::size_t workspace_bytes(const Context& context, const Conv2dShape& shape, int n);

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
