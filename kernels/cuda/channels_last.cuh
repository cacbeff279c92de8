// Activations and weights in the layout that tensor-core products read: channels last, as operands
// of a Math (tensor_math.cuh). The functions are instantiated for every Math.
#pragma once

#include "kernels/cuda/kernels.hpp"
#include "kernels/cuda/tensor_math.cuh"

namespace gyre::SIMT_NAMESPACE {

// Converts x [n][channels][plane] to `to` [n][plane][channels].
template <typename Math>
void to_channels_last(const Context& context, int n, const Shape& shape,
                      const typename Math::Elem* x, typename Math::Elem* to);

// The gradient of a convolution's output before its fused operations: `to` [n][H][W][channels] of
// shape `out`. dy and y are [n][channels][H][W], or have the shape after 2 x 2
// max-pooling if `argmax` is not null; argmax [n][H / 2][W / 2][channels] is the output in the
// window (0-3) that receives dy. If y is not null, dy counts only where y > 0 or is NaN.
template <typename Math>
void gradient_to_channels_last(const Context& context, int n, const Shape& out,
                               const typename Math::Elem* y, const std::uint8_t* argmax,
                               const typename Math::Elem* dy, typename Math::Elem* to);

// Converts w [out_channels][channels][K][K] to `to` [out_channels][K][K][channels] and, for the
// input gradient, to `turned` [channels][K][K][out_channels] with rows and columns reversed. Either
// destination may be null.
template <typename Math>
void pack_weights(const Context& context, const Conv2dShape& shape, const float* w,
                  typename Math::Elem* to, typename Math::Elem* turned);

}  // namespace gyre::SIMT_NAMESPACE
