// Activations and weights as products on tensor cores read them: channels last, as operands of a
// Math (tensor_math.cuh), which these functions are there for.
#pragma once

#include "kernels/cuda/kernels.hpp"
#include "kernels/cuda/tensor_math.cuh"

namespace gyre::SIMT_NAMESPACE {

// x [n][channels][plane] to `to` [n][plane][channels].
template <typename Math>
void to_channels_last(const Context& context, int n, const Shape& shape,
                      const typename Math::Elem* x, typename Math::Elem* to);

// The gradient of a convolution's output before what is fused with it: `to` [n][H][W][channels],
// of the shape `out`. dy and y are [n][channels][H][W], or where `argmax` is not null, of 2 x 2
// max-pooling's shape; argmax [n][H / 2][W / 2][channels] says which of the window's outputs (0-3)
// dy belongs to. y, unless null: dy counts where y > 0 or is NaN.
template <typename Math>
void gradient_to_channels_last(const Context& context, int n, const Shape& out,
                               const typename Math::Elem* y, const std::uint8_t* argmax,
                               const typename Math::Elem* dy, typename Math::Elem* to);

// w [out_channels][channels][K][K] to `to` [out_channels][K][K][channels], and to `turned`, for the
// gradient of the input, [channels][K][K][out_channels] with rows and columns in reverse. One of
// them may be null.
template <typename Math>
void pack_weights(const Context& context, const Conv2dShape& shape, const float* w,
                  typename Math::Elem* to, typename Math::Elem* turned);

}  // namespace gyre::SIMT_NAMESPACE
