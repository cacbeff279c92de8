// Activations and weights as products on tensor cores read them: channels last, rounded to TF32.
#pragma once

#include "kernels/cuda/kernels.hpp"

namespace gyre::SIMT_NAMESPACE {

// x [n][channels][plane] to `to` [n][plane][channels].
void to_channels_last(const Context& context, int n, const Shape& shape, const float* x, float* to);

// The gradient of a convolution's output before what is fused with it: `to` [n][H][W][channels],
// of the shape `out`. dy and y are [n][channels][H][W], or where `argmax` is not null, of 2 x 2
// max-pooling's shape; argmax [n][H / 2][W / 2][channels] says which of the window's outputs (0-3)
// dy belongs to. y, unless null: dy counts where y > 0 or is NaN.
void gradient_to_channels_last(const Context& context, int n, const Shape& out, const float* y,
                               const std::uint8_t* argmax, const float* dy, float* to);

// w [out_channels][channels][K][K] to `to` [out_channels][K][K][channels], or turned, for the
// gradient of the input, [channels][K][K][out_channels] with rows and columns in reverse.
void pack_weights(const Context& context, const Conv2dShape& shape, bool turned, const float* w,
                  float* to);

}  // namespace gyre::SIMT_NAMESPACE
