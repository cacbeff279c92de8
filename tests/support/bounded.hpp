// Running error analysis (Higham, Accuracy and Stability of Numerical Algorithms, section 3.3):
// numbers in double precision, with a bound on float32's error.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "tests/kernels/reference.hpp"
#include "tests/support/catch.hpp"

namespace gyre::test {

struct Bounded {
    double value = 0.0, error = 0.0;
    Bounded() = default;
    Bounded(double exact) : value(exact) {}  // NOLINT: implicit: a known operand has no error
    Bounded(double value_, double error_) : value(value_), error(error_) {}

    double magnitude() const { return std::abs(value) + error; }
    Bounded rounded(int roundings = 1) const {
        return {value, error + reference::Sums::rounding(roundings) * magnitude()};
    }
};

inline Bounded operator+(const Bounded& a, const Bounded& b) {
    return Bounded(a.value + b.value, a.error + b.error).rounded();
}
inline Bounded operator-(const Bounded& a, const Bounded& b) {
    return a + Bounded(-b.value, b.error);
}
inline Bounded operator*(const Bounded& a, const Bounded& b) {
    return Bounded(a.value * b.value, a.magnitude() * b.error + a.error * std::abs(b.value))
        .rounded();
}
inline Bounded operator/(const Bounded& a, double exact) {
    return Bounded(a.value / exact, a.error / std::abs(exact)).rounded();
}

class BoundedSum {
 public:
    void add(const Bounded& term) {
        sum_.value += term.value;
        sum_.error += term.error;
        magnitude_ += term.magnitude();
        ++terms_;
    }
    // `roundings`: the most roundings that a term goes through.
    Bounded result(int roundings) const {
        return {sum_.value, sum_.error + reference::Sums::rounding(roundings) * magnitude_};
    }
    Bounded result() const { return result(terms_); }

 private:
    Bounded sum_;
    double magnitude_ = 0.0;
    int terms_ = 0;
};

// One channel of a batch normalisation (formulas: BatchNorm2dSpec), where x and dy are its values.
// roundings: the most that a term of its sums goes through.
struct NormChannel {
    Bounded mean, inverse, unbiased = {};
    int roundings = 0;

    static Bounded inverse_deviation(const Bounded& variance, float epsilon) {
        const auto at = [&](double v) {
            return 1.0 / std::sqrt(std::max(v, 0.0) + double{epsilon});
        };
        const double value = at(variance.value);
        const double high = at(variance.value - variance.error) - value;
        const double low = value - at(variance.value + variance.error);
        return Bounded(value, std::max(high, low)).rounded();
    }
    static NormChannel running(float mean, float variance, float epsilon) {
        return {.mean = double{mean}, .inverse = inverse_deviation(double{variance}, epsilon)};
    }
    static NormChannel measured(const std::vector<Bounded>& x, int roundings, float epsilon) {
        const auto count = static_cast<double>(x.size());
        BoundedSum sum;
        for (const Bounded& v : x) {
            sum.add(v);
        }
        const Bounded mean = sum.result(roundings) / count;
        // The sum of (x - m)^2 is that of (x - mean)^2 plus count (m - mean)^2: a small error of m
        // is of second order, an error of x is not. Each difference and its square are rounded.
        double squares = 0.0, error = 0.0, magnitude = 0.0;
        for (const Bounded& v : x) {
            const double d = std::abs(v.value - mean.value), off = v.error + mean.error;
            squares += d * d;
            error += 2.0 * d * v.error + off * off;
            magnitude += (d + off) * (d + off);
        }
        const Bounded all(squares, error + reference::Sums::rounding(roundings + 3) * magnitude);
        return {mean, inverse_deviation(all / count, epsilon), all / std::max(count - 1.0, 1.0),
                roundings};
    }
    Bounded y(const Bounded& x, const Bounded& weight, const Bounded& bias) const {
        return (x - mean) * (inverse * weight) + bias;
    }
    struct Gradients {
        Bounded weight, bias;
    };
    Gradients gradients(const std::vector<Bounded>& x, const std::vector<Bounded>& dy) const {
        BoundedSum of_dy, of_products;
        for (std::size_t i = 0; i < x.size(); ++i) {
            of_dy.add(dy[i]);
            of_products.add(dy[i] * (x[i] - mean) * inverse);
        }
        return {of_products.result(roundings), of_dy.result(roundings)};
    }
    // all: sums over `count` values.
    Bounded dx(const Bounded& x, const Bounded& dy, const Bounded& weight, const Gradients& all,
               double count) const {
        return weight * inverse *
               (dy - all.bias / count - (x - mean) * (all.weight / count * inverse));
    }
};

inline void check_within(const std::vector<float>& found, const std::vector<Bounded>& expected) {
    REQUIRE(found.size() == expected.size());
    std::size_t wrong = 0, first = 0;
    for (std::size_t i = 0; i < found.size(); ++i) {
        // Written such that NaN fails.
        if (!(std::abs(double{found[i]} - expected[i].value) <= expected[i].error)) {
            first = wrong++ == 0 ? i : first;
        }
    }
    INFO(wrong << " of " << found.size() << " wrong, first " << first << ": "
               << (wrong ? found[first] : 0.0f) << ", expected "
               << (wrong ? expected[first].value : 0.0) << " to within "
               << (wrong ? expected[first].error : 0.0));
    CHECK(wrong == 0);
}

}  // namespace gyre::test
