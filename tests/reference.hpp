// Naive double-precision references of the kernels, on [n][shape] arrays, with a bound for the
// rounding error of each element.
//
// A sum of K products in float32, in any order and with or without fused multiply-adds, is off by
// at most (K + 1) u / (1 - (K + 1) u) times the sum of the products' magnitudes, u = 2^-24 (Higham,
// Accuracy and Stability of Numerical Algorithms, section 3.1).
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "kernels/ops/shapes.hpp"

namespace gyre::reference {

using Floats = std::vector<float>;

// Exact values with the bound of their float32 rounding error.
struct Sums {
    std::vector<double> value, magnitude;
    std::vector<int> terms;
    std::vector<double> other_bound;  // of another algorithm that may be used instead; or empty
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
    double bound(std::size_t i) const {
        const double direct = rounding(terms[i] + 1) * magnitude[i];
        return other_bound.empty() ? direct : std::max(direct, other_bound[i]);
    }
    // Largest relative error of `roundings` roundings one after another.
    static double rounding(int roundings) {
        const double ku = roundings * 0x1p-24;
        return ku / (1.0 - ku);
    }
};

// Calls body(image, o, oh, ow, c, ih, iw, weight index) for every multiply-add of a convolution.
template <typename Body>
void for_each_product(const Conv2dShape& s, int n, Body body) {
    const Shape out = s.out();
    for (int i = 0; i < n; ++i) {
        for (int o = 0; o < s.out_channels; ++o) {
            for (int oh = 0; oh < out.height; ++oh) {
                for (int ow = 0; ow < out.width; ++ow) {
                    for (int c = 0; c < s.in.channels; ++c) {
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
                                    ((std::int64_t{i} * s.in.channels + c) * s.in.height + ih) *
                                        s.in.width +
                                    iw;
                                const std::int64_t w =
                                    ((std::int64_t{o} * s.in.channels + c) * s.kernel + kh) *
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

// A linear layer is a 1 x 1 convolution of 1 x 1 images.
inline Conv2dShape as_conv(const LinearShape& s) {
    return {{s.in_features, 1, 1}, s.out_features, 1, 1, 0};
}

inline double at(const Floats& values, std::int64_t i) {
    return double{values[static_cast<std::size_t>(i)]};
}

// The rounding error of Winograd's F(2 x 2, 3 x 3) for x correlated with w (given as w(o, c, kh,
// kw)), padding and stride 1: the same kind of bound, with the transforms' absolute values,
// |A^T| [sum over c of |G||w||G^T| * |B^T||x||B|] |A|. Per term: 2 + 4 roundings of the transforms
// of x and w, one product, `channels` sums, 4 of the output's transform, and the bias.
template <typename Weight>
std::vector<double> winograd_bound(const Shape& in, const Shape& out, int padding, int n,
                                   const Floats& x, Weight w) {
    const double g[4][3] = {{1, 0, 0}, {.5, .5, .5}, {.5, .5, .5}, {0, 0, 1}};
    const double b[4][4] = {{1, 0, 1, 0}, {0, 1, 1, 0}, {0, 1, 1, 0}, {0, 1, 0, 1}};
    const double a[2][4] = {{1, 1, 1, 0}, {0, 1, 1, 1}};
    std::vector<double> bound(static_cast<std::size_t>(n * out.elems()));
    for (int image = 0; image < n; ++image) {
        for (int o = 0; o < out.channels; ++o) {
            for (int top = 0; top < out.height; top += 2) {
                for (int left = 0; left < out.width; left += 2) {
                    double m[4][4] = {};
                    for (int c = 0; c < in.channels; ++c) {
                        for (int i = 0; i < 4; ++i) {
                            for (int j = 0; j < 4; ++j) {
                                double tw = 0.0, tx = 0.0;
                                for (int kh = 0; kh < 3; ++kh) {
                                    for (int kw = 0; kw < 3; ++kw) {
                                        tw += g[i][kh] * g[j][kw] * std::abs(w(o, c, kh, kw));
                                    }
                                }
                                for (int p = 0; p < 4; ++p) {
                                    for (int q = 0; q < 4; ++q) {
                                        const int ih = top - padding + p, iw = left - padding + q;
                                        if (ih >= 0 && iw >= 0 && ih < in.height && iw < in.width) {
                                            tx += b[i][p] * b[j][q] *
                                                  std::abs(at(
                                                      x, ((std::int64_t{image} * in.channels + c) *
                                                              in.height +
                                                          ih) * in.width +
                                                             iw));
                                        }
                                    }
                                }
                                m[i][j] += tw * tx;
                            }
                        }
                    }
                    for (int i = 0; i < 2 && top + i < out.height; ++i) {
                        for (int j = 0; j < 2 && left + j < out.width; ++j) {
                            double sum = 1.0;  // the bias
                            for (int p = 0; p < 4; ++p) {
                                for (int q = 0; q < 4; ++q) {
                                    sum += a[i][p] * a[j][q] * m[p][q];
                                }
                            }
                            bound[static_cast<std::size_t>(
                                ((std::int64_t{image} * out.channels + o) * out.height + top + i) *
                                    out.width +
                                left + j)] = Sums::rounding(in.channels + 12) * sum;
                        }
                    }
                }
            }
        }
    }
    return bound;
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
