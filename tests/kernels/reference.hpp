// Naive double-precision references of the kernels on [n][shape] arrays, with a bound on the
// rounding error of each element.
//
// A sum of K products in float32, in any order and with or without fused multiply-adds, has an
// error of at most (K + 1) u / (1 - (K + 1) u) times the sum of the products' magnitudes, u = 2^-24
// (Higham, Accuracy and Stability of Numerical Algorithms, section 3.1).
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "kernels/ops/specs.hpp"

namespace gyre::reference {

using Floats = std::vector<float>;

// Exact values with the bound on their float32 rounding error.
struct Sums {
    std::vector<double> value, magnitude;
    std::vector<int> terms;
    explicit Sums(std::int64_t elems)
        : value(static_cast<std::size_t>(elems)),
          magnitude(static_cast<std::size_t>(elems)),
          terms(static_cast<std::size_t>(elems)) {}
    void add(std::int64_t at, double term) {
        const auto i = static_cast<std::size_t>(at);
        value[i] += term;
        magnitude[i] += std::abs(term);
        ++terms[i];
    }
    double bound(std::size_t i) const { return rounding(terms[i] + 1) * magnitude[i]; }
    // The largest relative error of `roundings` successive roundings.
    static double rounding(int roundings) {
        const double ku = roundings * 0x1p-24;
        return ku / (1.0 - ku);
    }
};

// An activation function at x: its value, its derivative, and the sum of the magnitudes of the
// terms of which that consists.
struct Activated {
    double value, derivative, derivative_magnitude;
    int roundings;  // of a term in float32, as a relative error
};
inline Activated activated(const ActivationSpec& spec, double x) {
    if (spec.function == Activation::leaky_relu) {
        const double slope = x <= 0.0 ? double{spec.slope} : 1.0;
        return {slope * x, slope, slope, 1};
    }
    if (spec.function == Activation::relu6) {
        return {std::clamp(x, 0.0, 6.0), x > 0.0 && x < 6.0 ? 1.0 : 0.0, 1.0, 0};
    }
    const double ramp = std::clamp(x + 3.0, 0.0, 6.0) / 6.0, inside = std::abs(x) < 3.0 ? 1.0 : 0.0;
    if (spec.function == Activation::hardsigmoid) {
        return {ramp, inside / 6.0, inside / 6.0, 3};
    }
    if (spec.function == Activation::hardswish) {
        return {x * ramp, ramp + x * inside / 6.0, ramp + std::abs(x) * inside / 6.0, 4};
    }
    const bool gelu = spec.function == Activation::gelu;
    const auto share = [&](double at) {
        return gelu ? 0.5 * std::erfc(-at / std::sqrt(2.0)) : 1.0 / (1.0 + std::exp(-at));
    };
    const double slope_of_share =
        gelu ? std::exp(-0.5 * x * x) / std::sqrt(2.0 * std::acos(-1.0)) : share(x) * share(-x);
    // 24 for the exponential, the polynomial and the quotient; the exponent -x^2 / 2 is rounded,
    // too, and its error is that of the power, relative to it.
    const int roundings = 24 + static_cast<int>(std::min(x * x, 200.0));
    if (spec.function == Activation::sigmoid) {  // y (1 - y): the rounding of y counts in 1 - y
        return {share(x), slope_of_share, share(x), 2 * roundings};
    }
    return {x * share(x), share(x) + x * slope_of_share, share(x) + std::abs(x) * slope_of_share,
            roundings};
}
// Where the derivative jumps.
inline std::vector<double> jumps_of(Activation function) {
    switch (function) {
        case Activation::relu6:
            return {0.0, 6.0};
        case Activation::leaky_relu:
            return {0.0};
        case Activation::hardsigmoid:
        case Activation::hardswish:
            return {-3.0, 3.0};
        case Activation::gelu:
        case Activation::silu:
        case Activation::sigmoid:
            break;
    }
    return {};
}

// Calls body(image, o, oh, ow, c, ih, iw, weight index) for every multiply-add of a convolution.
template <typename Body>
void for_each_product(const Conv2dShape& s, int n, Body body) {
    const Shape out = s.out();
    for (int i = 0; i < n; ++i) {
        for (int o = 0; o < s.out_channels; ++o) {
            const int first = o / s.group_outputs() * s.group_inputs();
            for (int oh = 0; oh < out.height; ++oh) {
                for (int ow = 0; ow < out.width; ++ow) {
                    for (int c = 0; c < s.group_inputs(); ++c) {
                        for (int kh = 0; kh < s.kernel; ++kh) {
                            for (int kw = 0; kw < s.kernel; ++kw) {
                                const int ih = oh * s.stride - s.padding + kh;
                                const int iw = ow * s.stride - s.padding + kw;
                                if (ih < 0 || iw < 0 || ih >= s.in.height || iw >= s.in.width) {
                                    continue;
                                }
                                const std::int64_t y =
                                    ((std::int64_t{i} * s.out_channels + o) * out.height + oh) *
                                        out.width +
                                    ow;
                                const std::int64_t x =
                                    ((std::int64_t{i} * s.in.channels + first + c) * s.in.height +
                                     ih) *
                                        s.in.width +
                                    iw;
                                const std::int64_t w =
                                    ((std::int64_t{o} * s.group_inputs() + c) * s.kernel + kh) *
                                        s.kernel +
                                    kw;
                                body(y, x, w);
                            }
                        }
                    }
                }
            }
        }
    }
}

// Returns a linear layer as a 1 x 1 convolution of 1 x 1 images.
inline Conv2dShape as_conv(const LinearShape& s) {
    return {{s.in_features, 1, 1}, s.out_features, 1, 1, 0};
}

inline double at(const Floats& values, std::int64_t i) {
    return double{values[static_cast<std::size_t>(i)]};
}

inline Sums conv_forward(const Conv2dShape& s, int n, const Floats& x, const Floats& w,
                         const Floats& b) {
    Sums y(n * s.out().elems());
    for (std::int64_t i = 0; i < n * s.out().elems(); ++i) {
        y.add(i, at(b, i / s.out().plane_elems() % s.out_channels));
    }
    for_each_product(s, n, [&](auto yi, auto xi, auto wi) { y.add(yi, at(w, wi) * at(x, xi)); });
    return y;
}

inline Sums conv_backward_data(const Conv2dShape& s, int n, const Floats& dy, const Floats& w) {
    Sums dx(n * s.in.elems());
    for_each_product(s, n, [&](auto yi, auto xi, auto wi) { dx.add(xi, at(w, wi) * at(dy, yi)); });
    return dx;
}

inline Sums conv_backward_weights(const Conv2dShape& s, int n, const Floats& x, const Floats& dy) {
    Sums dw(s.weight_elems());
    for_each_product(s, n, [&](auto yi, auto xi, auto wi) { dw.add(wi, at(x, xi) * at(dy, yi)); });
    return dw;
}

inline Sums bias_gradient(const Shape& out, int n, const Floats& dy) {
    Sums db(out.channels);
    for (std::int64_t i = 0; i < n * out.elems(); ++i) {
        db.add(i / out.plane_elems() % out.channels, at(dy, i));
    }
    return db;
}

}  // namespace gyre::reference
