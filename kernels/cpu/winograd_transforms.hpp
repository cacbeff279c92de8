// The transforms of Winograd's minimal filtering F(4 x 4, K x K), which computes a tile of 4 x 4
// outputs of a convolution from N x N inputs, N = K + 3, with N * N products per pair of channels
// instead of 16 * K * K (Lavin and Gray, "Fast algorithms for convolutional neural networks", CVPR
// 2016):
//
//   y tile [4][4] = A^T [ sum over c of (G w[o][c] G^T) * (B^T x[c] tile [N][N] B) ] A
//
// As it is bilinear, its adjoint maps give both gradients:
//
//   dx[c] tile += B [ sum over o of (G w[o][c] G^T) * (A dy[o] tile A^T) ] B^T
//   dw[o][c] = G^T [ sum over tiles of (A dy[o] tile A^T) * (B^T x[c] tile B) ] G
//
// As in Toom and Cook's multiplication of polynomials, row i of A and G evaluates a polynomial at a
// point x_i, and B^T interpolates. With M(x) = product of (x - x_i) over the finite points,
//
//   A[i][k] = x_i^k,   G[i][k] = x_i^k / M'(x_i),   B^T[i] = coefficients of M(x) / (x - x_i)
//
// and for the point at infinity the coefficient of the highest power, and M itself. Besides 0 and
// infinity, points come in pairs +-p, whose odd and even terms are shared.
//
// Rounding errors grow with the spread of the points. Of points that are small fractions, these had
// the least error over forward and gradients (bounded by tests/kernels/products_test.cpp).
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>

#include "kernels/cpu/simd.hpp"

namespace gyre::cpu {

// The points of F(4 x 4, K x K): 0, +-at[0], +-at[1], ..., infinity.
template <int K>
inline constexpr std::array<double, (K + 1) / 2> kPairsAt{};
template <>
inline constexpr std::array<double, 2> kPairsAt<3>{0.625, 1.5};
template <>
inline constexpr std::array<double, 3> kPairsAt<5>{0.5, 1.0, 2.0};

template <int K>
struct Coefficients {
    static constexpr int kPairs = (K + 1) / 2, kPowers = std::max(K, 4);
    using Row = std::array<float, kPairs + 1>;
    Row all{};                         // M(x) / x = product of (x^2 - p^2), by powers of x^2
    std::array<Row, kPairs> others{};  // the same product without one pair
    std::array<float, kPairs> at{};
    // p^k for each pair, p^k / M'(p) for each pair, and 1 / M'(0).
    std::array<std::array<float, kPowers>, kPairs> powers{}, scaled{};
    float zero_scale = 0.0f;

    constexpr Coefficients() {
        const auto& p = kPairsAt<K>;
        all = even_polynomial(kPairs);
        zero_scale = 1.0f / all[0];
        for (std::size_t i = 0; i < p.size(); ++i) {
            at[i] = static_cast<float>(p[i]);
            others[i] = even_polynomial(i);
            double derivative = 2.0 * p[i] * p[i];
            for (std::size_t j = 0; j < p.size(); ++j) {
                derivative *= j == i ? 1.0 : p[i] * p[i] - p[j] * p[j];
            }
            double power = 1.0;
            for (std::size_t k = 0; k < kPowers; ++k) {
                powers[i][k] = static_cast<float>(power);
                scaled[i][k] = static_cast<float>(power / derivative);
                power *= p[i];
            }
        }
    }

 private:
    static constexpr Row even_polynomial(std::size_t without) {
        std::array<double, kPairs + 1> exact{1.0};
        for (std::size_t pair = 0; pair < kPairs; ++pair) {
            const double square = kPairsAt<K>[pair] * kPairsAt<K>[pair];
            for (std::size_t k = kPairs + 1; pair != without && k-- > 0;) {
                exact[k] = (k > 0 ? exact[k - 1] : 0.0) - square * exact[k];
            }
        }
        Row row{};
        for (std::size_t k = 0; k < row.size(); ++k) {
            row[k] = static_cast<float>(exact[k]);
        }
        return row;
    }
};

// The six maps along one axis. Index 0 is the point 0, indices 2i + 1 and 2i + 2 are +-p, and the
// last is infinity.
template <int K>
struct Transforms {
    static constexpr int kTile = 4;        // outputs
    static constexpr int kExtent = K + 3;  // inputs, and points
    static constexpr int kPairs = Coefficients<K>::kPairs;
    static constexpr Coefficients<K> kC{};

    // v = B^T d.
    [[gnu::always_inline]] static void input(const Vec (&d)[kExtent], Vec (&v)[kExtent]) {
        Vec zero = kC.all[0] * d[0], infinity = kC.all[0] * d[1];
#pragma GCC unroll 8
        for (int k = 1; k <= kPairs; ++k) {
            zero = multiply_add(kC.all[k], d[2 * k], zero);
            infinity = multiply_add(kC.all[k], d[2 * k + 1], infinity);
        }
#pragma GCC unroll 8
        for (int i = 0; i < kPairs; ++i) {
            Vec even = kC.others[i][0] * d[2], odd = kC.others[i][0] * d[1];
#pragma GCC unroll 8
            for (int k = 1; k < kPairs; ++k) {
                even = multiply_add(kC.others[i][k], d[2 * k + 2], even);
                odd = multiply_add(kC.others[i][k], d[2 * k + 1], odd);
            }
            v[2 * i + 1] = multiply_add(kC.at[i], odd, even);
            v[2 * i + 2] = multiply_add(kC.at[i], -odd, even);
        }
        v[0] = zero;
        v[kExtent - 1] = infinity;
    }

    // d = B v.
    [[gnu::always_inline]] static void input_adjoint(const Vec (&v)[kExtent], Vec (&d)[kExtent]) {
#pragma GCC unroll 8
        for (int k = 0; k <= kPairs; ++k) {
            d[2 * k] = kC.all[k] * v[0];
            d[2 * k + 1] = kC.all[k] * v[kExtent - 1];
        }
#pragma GCC unroll 8
        for (int i = 0; i < kPairs; ++i) {
            const Vec even = v[2 * i + 1] + v[2 * i + 2];
            const Vec odd = kC.at[i] * (v[2 * i + 1] - v[2 * i + 2]);
#pragma GCC unroll 8
            for (int k = 0; k < kPairs; ++k) {
                d[2 * k + 2] = multiply_add(kC.others[i][k], even, d[2 * k + 2]);
                d[2 * k + 1] = multiply_add(kC.others[i][k], odd, d[2 * k + 1]);
            }
        }
    }

    // y = A^T m.
    [[gnu::always_inline]] static void output(const Vec (&m)[kExtent], Vec (&y)[kTile]) {
        interpolate<kTile>(m, y, 1.0f, kC.powers);
    }
    // m = A y.
    [[gnu::always_inline]] static void output_adjoint(const Vec (&y)[kTile], Vec (&m)[kExtent]) {
        evaluate<kTile>(y, m, 1.0f, kC.powers);
    }
    // u = G w.
    [[gnu::always_inline]] static void weights(const Vec (&w)[K], Vec (&u)[kExtent]) {
        evaluate<K>(w, u, kC.zero_scale, kC.scaled);
    }
    // w = G^T u.
    [[gnu::always_inline]] static void weights_adjoint(const Vec (&u)[kExtent], Vec (&w)[K]) {
        interpolate<K>(u, w, kC.zero_scale, kC.scaled);
    }

 private:
    using Factors = std::array<std::array<float, Coefficients<K>::kPowers>, kPairs>;
    // to[+-p] = sum over k of factors[p][k] (+-1)^k from[k].
    template <int kTerms>
    [[gnu::always_inline]] static void evaluate(const Vec (&from)[kTerms], Vec (&to)[kExtent],
                                                float zero_scale, const Factors& factors) {
        to[0] = zero_scale * from[0];
        to[kExtent - 1] = from[kTerms - 1];
#pragma GCC unroll 8
        for (int i = 0; i < kPairs; ++i) {
            Vec even = factors[i][0] * from[0], odd = factors[i][1] * from[1];
#pragma GCC unroll 8
            for (int k = 2; k < kTerms; ++k) {
                Vec& sum = k % 2 == 0 ? even : odd;
                sum = multiply_add(factors[i][k], from[k], sum);
            }
            to[2 * i + 1] = even + odd;
            to[2 * i + 2] = even - odd;
        }
    }
    // The adjoint of evaluate(): to[k] = sum over +-p of factors[p][k] (+-1)^k from[+-p].
    template <int kTerms>
    [[gnu::always_inline]] static void interpolate(const Vec (&from)[kExtent], Vec (&to)[kTerms],
                                                   float zero_scale, const Factors& factors) {
        Vec even[kPairs], odd[kPairs];
#pragma GCC unroll 8
        for (int i = 0; i < kPairs; ++i) {
            even[i] = from[2 * i + 1] + from[2 * i + 2];
            odd[i] = from[2 * i + 1] - from[2 * i + 2];
        }
#pragma GCC unroll 8
        for (int k = 0; k < kTerms; ++k) {
            const auto& terms = k % 2 == 0 ? even : odd;
            to[k] = factors[0][k] * terms[0];
#pragma GCC unroll 8
            for (int i = 1; i < kPairs; ++i) {
                to[k] = multiply_add(factors[i][k], terms[i], to[k]);
            }
        }
        to[0] = multiply_add(zero_scale, from[0], to[0]);
        to[kTerms - 1] += from[kExtent - 1];
    }
};

// Applies map along both axes: put(i, j, v), v [To][To] = map(map(get [From][From])^T)^T.
template <int From, int To, typename Get, typename Map, typename Put>
[[gnu::always_inline]] inline void transform_2d(Get&& get, Map&& map, Put&& put) {
    Vec half[To][From];
    for (int j = 0; j < From; ++j) {
        Vec column[From], mapped[To];
#pragma GCC unroll 8
        for (int i = 0; i < From; ++i) {
            column[i] = get(i, j);
        }
        map(column, mapped);
#pragma GCC unroll 8
        for (int i = 0; i < To; ++i) {
            half[i][j] = mapped[i];
        }
    }
    for (int i = 0; i < To; ++i) {
        Vec mapped[To];
        map(half[i], mapped);
#pragma GCC unroll 8
        for (int j = 0; j < To; ++j) {
            put(i, j, mapped[j]);
        }
    }
}

}  // namespace gyre::cpu
