// Activation functions other than ReLU: the formula of each and of its derivative for one element,
// which the kernels of CPUs and GPUs share. To add one, add its enumerator to Activation
// (kernels/ops/specs.hpp), its formula here, and its word in model/layers.cpp.
//
// A formula has
//   kInPlace           whether y replaces x, as the derivative follows from the sign of y (a
//                      dropout that follows scales y in place)
//   value(x)           y
//   derivative(at)     dy/dx where y (if in place) or x (if not) is `at`
// NaN stays NaN. Errors are a few units in the last place of the largest term.
#pragma once

#include <cmath>

#include "base/data_type.hpp"
#include "kernels/ops/specs.hpp"

namespace gyre {

// e^x for x <= 0, and e^-87, which is still a normal number, below -87. Without a call, so that
// loops vectorise. x = n ln 2 + r with |r| <= ln 2 / 2, where ln 2 has two parts, of which the
// first has few enough bits for an exact product; e^r by the polynomial of Cephes' expf (S.
// Moshier). Adding 1.5 * 2^23 rounds to an integer, which then lies in the lowest bits.
GYRE_HOST_DEVICE inline float exp_of_negative(float x) {
    const float within = x < -87.0f ? -87.0f : x;
    const float shifted = within * 1.44269504f + 12582912.0f;
    const float n = shifted - 12582912.0f;
    const float r = within - n * 0.693359375f + n * 2.12194440e-4f;
    float sum = 1.9875691500e-4f;
    sum = sum * r + 1.3981999507e-3f;
    sum = sum * r + 8.3334519073e-3f;
    sum = sum * r + 4.1665795894e-2f;
    sum = sum * r + 1.6666665459e-1f;
    sum = sum * r + 5.0000001201e-1f;
    sum = sum * r * r + r + 1.0f;
    return sum * narrow::float_of((narrow::bits_of(shifted) + 127u) << 23);
}

// torch.nn.GELU: x Phi(x), where Phi is the normal distribution's cumulative function (Hendrycks
// and Gimpel, 2016); the derivative is Phi(x) + x phi(x) with its density phi.
struct Gelu {
    static constexpr const char *kForward = "gelu_forward", *kBackward = "gelu_backward";
    static constexpr bool kInPlace = false;

    // With a = |x|: Phi(-a) = e^(-a^2 / 2) P(t), t = 1 / (1 + 0.26 a). P was fitted to the least
    // relative error for a <= 13, 1.9e-8.
    struct Normal {
        float cumulative, density;
    };
    GYRE_HOST_DEVICE static Normal normal(float x) {
        const float power = exp_of_negative(-0.5f * x * x);
        const float t = 1.0f / (1.0f + 0.26f * fabsf(x));
        float sum = 0.0310658587f;
        sum = sum * t - 0.155573502f;
        sum = sum * t + 0.257208885f;
        sum = sum * t - 0.157558564f;
        sum = sum * t + 0.165575611f;
        sum = sum * t + 0.0490222502f;
        sum = sum * t + 0.103554558f;
        sum = sum * t + 0.102941254f;
        sum = sum * t + 0.103763639f;
        const float below = power * (sum * t);
        return {x < 0.0f ? below : 1.0f - below, power * 0.398942280f};  // 1 / sqrt(2 pi)
    }
    GYRE_HOST_DEVICE static float value(float x) { return x * normal(x).cumulative; }
    GYRE_HOST_DEVICE static float derivative(float x) {
        const Normal at = normal(x);
        return at.cumulative + x * at.density;
    }
};

// torch.nn.Sigmoid: s(x) = 1 / (1 + e^-x); the derivative is s(x) (1 - s(x)).
struct Sigmoid {
    static constexpr const char *kForward = "sigmoid_forward", *kBackward = "sigmoid_backward";
    static constexpr bool kInPlace = false;

    GYRE_HOST_DEVICE static float value(float x) {
        const float power = exp_of_negative(-fabsf(x));
        const float large = 1.0f / (1.0f + power);
        return x < 0.0f ? power * large : large;
    }
    GYRE_HOST_DEVICE static float derivative(float x) {
        const float power = exp_of_negative(-fabsf(x));
        const float large = 1.0f / (1.0f + power);
        return power * large * large;
    }
};

// torch.nn.SiLU: x s(x), also called swish; the derivative is s(x) (1 + x s(-x)).
struct Silu {
    static constexpr const char *kForward = "silu_forward", *kBackward = "silu_backward";
    static constexpr bool kInPlace = false;

    GYRE_HOST_DEVICE static float value(float x) { return x * Sigmoid::value(x); }
    GYRE_HOST_DEVICE static float derivative(float x) {
        const float power = exp_of_negative(-fabsf(x));
        const float large = 1.0f / (1.0f + power), small = power * large;
        return x < 0.0f ? small * (1.0f + x * large) : large * (1.0f + x * small);
    }
};

// torch.nn.LeakyReLU: x where x > 0, else slope x. slope > 0, so that y has the sign of x.
struct LeakyRelu {
    static constexpr const char *kForward = "leaky_relu_forward",
                                *kBackward = "leaky_relu_backward";
    static constexpr bool kInPlace = true;
    float slope;

    GYRE_HOST_DEVICE float value(float x) const { return x <= 0.0f ? slope * x : x; }
    GYRE_HOST_DEVICE float derivative(float y) const { return y <= 0.0f ? slope : 1.0f; }
};

// torch.nn.ReLU6: min(max(x, 0), 6).
struct Relu6 {
    static constexpr const char *kForward = "relu6_forward", *kBackward = "relu6_backward";
    static constexpr bool kInPlace = false;

    GYRE_HOST_DEVICE static float value(float x) { return x <= 0.0f ? 0.0f : x >= 6.0f ? 6.0f : x; }
    GYRE_HOST_DEVICE static float derivative(float x) {
        return x <= 0.0f || x >= 6.0f ? 0.0f : 1.0f;
    }
};

// torch.nn.Hardsigmoid: min(max(x + 3, 0), 6) / 6.
struct HardSigmoid {
    static constexpr const char *kForward = "hardsigmoid_forward",
                                *kBackward = "hardsigmoid_backward";
    static constexpr bool kInPlace = false;

    GYRE_HOST_DEVICE static float value(float x) {
        return (x <= -3.0f ? 0.0f : x >= 3.0f ? 6.0f : x + 3.0f) * (1.0f / 6.0f);
    }
    GYRE_HOST_DEVICE static float derivative(float x) {
        return x <= -3.0f || x >= 3.0f ? 0.0f : 1.0f / 6.0f;
    }
};

// torch.nn.Hardswish (Howard et al., "Searching for MobileNetV3", 2019): x min(max(x + 3, 0), 6)
// / 6.
struct HardSwish {
    static constexpr const char *kForward = "hardswish_forward", *kBackward = "hardswish_backward";
    static constexpr bool kInPlace = false;

    GYRE_HOST_DEVICE static float value(float x) { return x * HardSigmoid::value(x); }
    GYRE_HOST_DEVICE static float derivative(float x) {
        return x <= -3.0f ? 0.0f : x >= 3.0f ? 1.0f : x * (1.0f / 3.0f) + 0.5f;
    }
};

// Returns make(the formula).
template <typename Make>
auto with_activation(const ActivationSpec& spec, Make make) {
    switch (spec.function) {
        case Activation::gelu:
            return make(Gelu{});
        case Activation::silu:
            return make(Silu{});
        case Activation::relu6:
            return make(Relu6{});
        case Activation::sigmoid:
            return make(Sigmoid{});
        case Activation::hardsigmoid:
            return make(HardSigmoid{});
        case Activation::hardswish:
            return make(HardSwish{});
        case Activation::leaky_relu:
            break;
    }
    return make(LeakyRelu{spec.slope});
}

}  // namespace gyre
