// How the two implementations of a convolution share the work: direct (conv2d_direct.cu) where few
// channels leave a matrix product too little to share, implicit GEMM (conv2d_gemm.cu) otherwise.
#pragma once

#include "kernels/cuda/kernels.hpp"

namespace gyre::SIMT_NAMESPACE::direct {

// Each returns whether it can compute this shape. workspace: elems that backward_weights needs.
bool can_forward(const Conv2dShape& shape);
bool can_backward_data(const Conv2dShape& shape);
bool can_backward_weights(const Conv2dShape& shape);
std::int64_t workspace_elems(const Context& context, const Conv2dShape& shape, int n);

void forward(const Context& context, const Conv2dShape& shape, int n, const float* x,
             const float* w, const float* b, float* y);
void backward_data(const Context& context, const Conv2dShape& shape, int n, const float* dy,
                   const float* w, float* dx);
void backward_weights(const Context& context, const Conv2dShape& shape, int n, const float* x,
                      const float* dy, float* dw, float* db);

}  // namespace gyre::SIMT_NAMESPACE::direct
