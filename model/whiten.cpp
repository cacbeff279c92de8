#include "model/whiten.hpp"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace gyre::model {
namespace {

// A symmetric matrix [size][size].
struct Matrix {
    std::size_t size;
    std::vector<double> values = std::vector<double>(size * size);
    double& at(std::size_t row, std::size_t column) { return values[row * size + column]; }
};

// Makes m diagonal, by Jacobi's rotations; the rows of the result are its eigenvectors, of length
// 1, in the order of the diagonal.
Matrix diagonalise(Matrix& m) {
    const std::size_t size = m.size;
    Matrix vectors{size};
    double trace = 0.0;
    for (std::size_t i = 0; i < size; ++i) {
        vectors.at(i, i) = 1.0;
        trace += m.at(i, i);
    }
    constexpr int kMostSweeps = 50;
    for (int sweep = 0; sweep < kMostSweeps; ++sweep) {
        double largest = 0.0;
        for (std::size_t p = 0; p + 1 < size; ++p) {
            for (std::size_t q = p + 1; q < size; ++q) {
                const double off = m.at(p, q);
                largest = std::max(largest, std::abs(off));
                if (off == 0.0) {
                    continue;
                }
                const double theta = (m.at(q, q) - m.at(p, p)) / (2.0 * off);
                const double t =
                    std::copysign(1.0 / (std::abs(theta) + std::sqrt(theta * theta + 1.0)), theta);
                const double c = 1.0 / std::sqrt(t * t + 1.0), s = t * c;
                const auto rotate = [&](double& a, double& b) {
                    const double first = c * a - s * b;
                    b = s * a + c * b;
                    a = first;
                };
                for (std::size_t i = 0; i < size; ++i) {
                    rotate(m.at(p, i), m.at(q, i));
                }
                for (std::size_t i = 0; i < size; ++i) {
                    rotate(m.at(i, p), m.at(i, q));
                    rotate(vectors.at(p, i), vectors.at(q, i));
                }
            }
        }
        if (largest <= 1e-14 * trace) {
            break;
        }
    }
    return vectors;
}

}  // namespace

WindowMoments::WindowMoments(const WindowShape& window)
    : window_(window),
      sums_(static_cast<std::size_t>(window.elems())),
      products_(sums_.size() * sums_.size()) {}

void WindowMoments::add(const std::uint8_t* pixels, const Shape& shape) {
    std::vector<std::int64_t> offsets;  // of the window's elements
    for (int c = 0; c < window_.channels; ++c) {
        for (int y = 0; y < window_.height; ++y) {
            for (int x = 0; x < window_.width; ++x) {
                offsets.push_back((std::int64_t{c} * shape.height + y) * shape.width + x);
            }
        }
    }
    const int rows = shape.height - window_.height + 1, columns = shape.width - window_.width + 1;
    for (int y = 0; y < rows; ++y) {
        const std::uint8_t* const line = pixels + std::int64_t{y} * shape.width;
        for (std::size_t i = 0; i < offsets.size(); ++i) {
            const std::uint8_t* const a = line + offsets[i];
            for (int x = 0; x < columns; ++x) {
                sums_[i] += a[x];
            }
            for (std::size_t j = i; j < offsets.size(); ++j) {
                const std::uint8_t* const b = line + offsets[j];
                std::int64_t sum = 0;
                for (int x = 0; x < columns; ++x) {
                    sum += a[x] * b[x];
                }
                products_[i * offsets.size() + j] += sum;
            }
        }
    }
    windows_ += std::int64_t{rows} * columns;
}

std::vector<float> WindowMoments::whitening_filters(int filters, const std::vector<float>& scale,
                                                    const std::vector<float>& shift) const {
    const std::size_t size = sums_.size();
    const auto area = static_cast<std::size_t>(window_.height) *
                      static_cast<std::size_t>(window_.width);  // of a channel
    const auto mean = [&](std::int64_t sum) {
        return static_cast<double>(sum) / static_cast<double>(windows_);
    };
    Matrix moments{size};
    for (std::size_t i = 0; i < size; ++i) {
        for (std::size_t j = i; j < size; ++j) {
            const double a = double{scale[i / area]}, b = double{shift[i / area]};
            const double c = double{scale[j / area]}, d = double{shift[j / area]};
            const double moment = a * c * mean(products_[i * size + j]) + a * d * mean(sums_[i]) +
                                  b * c * mean(sums_[j]) + b * d;
            moments.at(i, j) = moments.at(j, i) = moment;
        }
    }
    Matrix vectors = diagonalise(moments);
    std::vector<std::size_t> order(size);
    std::iota(order.begin(), order.end(), std::size_t{0});
    std::ranges::stable_sort(
        order, [&](std::size_t a, std::size_t b) { return moments.at(a, a) > moments.at(b, b); });
    const std::size_t count = static_cast<std::size_t>(filters), half = (count + 1) / 2;
    std::vector<float> values(count * size);
    for (std::size_t f = 0; f < count; ++f) {
        const std::size_t k = order[f % half];
        const double sign = f < half ? 1.0 : -1.0;
        const double deviation = std::sqrt(std::max(moments.at(k, k), 0.0) + 5e-4);
        for (std::size_t i = 0; i < size; ++i) {
            values[f * size + i] = static_cast<float>(sign * vectors.at(k, i) / deviation);
        }
    }
    return values;
}

}  // namespace gyre::model
