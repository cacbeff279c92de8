// Whitening filters: what they make of the images whose moments they come from.
#include "model/whiten.hpp"

#include <cmath>
#include <vector>

#include "tests/support/catch.hpp"

using namespace gyre;
using namespace gyre::model;

namespace {

constexpr int kImages = 20;
const Shape kShape{2, 9, 7};
const WindowShape kWindow{2, 2, 3};
const std::vector<float> kScale = {1.0f / 64, 1.0f / 32}, kShift = {-2.0f, -3.0f};

// Smooth images, whose neighbouring pixels resemble each other, as those of pictures do.
std::vector<std::uint8_t> image_of(int number) {
    std::vector<std::uint8_t> pixels;
    for (int c = 0; c < kShape.channels; ++c) {
        for (int y = 0; y < kShape.height; ++y) {
            for (int x = 0; x < kShape.width; ++x) {
                const double wave = std::sin(0.7 * number + 0.5 * y * (1 + number % 3)) +
                                    std::cos(0.4 * x * (1 + number % 5) + c);
                pixels.push_back(static_cast<std::uint8_t>(128.0 + 50.0 * wave + number % 7));
            }
        }
    }
    return pixels;
}

// The products of a filter with each window of all images.
std::vector<double> responses(const float* filter) {
    std::vector<double> all;
    for (int number = 0; number < kImages; ++number) {
        const std::vector<std::uint8_t> pixels = image_of(number);
        for (int y = 0; y + kWindow.height <= kShape.height; ++y) {
            for (int x = 0; x + kWindow.width <= kShape.width; ++x) {
                double sum = 0.0;
                for (int i = 0; i < kWindow.elems(); ++i) {
                    const int c = i / (kWindow.height * kWindow.width);
                    const int row = y + i / kWindow.width % kWindow.height;
                    const int column = x + i % kWindow.width;
                    const auto at =
                        static_cast<std::size_t>((c * kShape.height + row) * kShape.width + column);
                    const auto channel = static_cast<std::size_t>(c);
                    sum += double{filter[i]} *
                           (double{kScale[channel]} * pixels[at] + double{kShift[channel]});
                }
                all.push_back(sum);
            }
        }
    }
    return all;
}

double mean_product(const std::vector<double>& a, const std::vector<double>& b) {
    double sum = 0.0;
    for (std::size_t i = 0; i < a.size(); ++i) {
        sum += a[i] * b[i];
    }
    return sum / static_cast<double>(a.size());
}

WindowMoments moments(bool reversed) {
    WindowMoments all(kWindow);
    for (int i = 0; i < kImages; ++i) {
        all.add(image_of(reversed ? kImages - 1 - i : i).data(), kShape);
    }
    return all;
}

}  // namespace

TEST_CASE("whitened windows have values that are uncorrelated and at most of size 1") {
    const auto size = static_cast<int>(kWindow.elems());
    const WindowMoments all = moments(false);
    CHECK(all.windows() == kImages * 8 * 5);
    const std::vector<float> filters = all.whitening_filters(2 * size, kScale, kShift);
    std::vector<std::vector<double>> values;
    for (int f = 0; f < 2 * size; ++f) {
        values.push_back(responses(filters.data() + f * size));
    }
    // A component with the moment m keeps m / (m + 0.0005) of it; the filters are rounded to
    // float32, in sums of so many terms of up to about 3, divided by 0.02 at least.
    constexpr double kRounding = 12 * 3 * 0x1p-24 / 0.02 * 8;
    double before = 2.0;
    for (std::size_t f = 0; f < static_cast<std::size_t>(size); ++f) {
        const double moment = mean_product(values[f], values[f]);
        CHECK(moment < 1.0 + kRounding);
        CHECK(moment <= before + kRounding);
        before = moment;
        for (std::size_t other = 0; other < f; ++other) {
            CHECK(std::abs(mean_product(values[f], values[other])) < kRounding);
        }
    }
    CHECK(mean_product(values[0], values[0]) > 0.99);
    for (int i = 0; i < size * size; ++i) {
        CHECK(filters[static_cast<std::size_t>(size * size + i)] ==
              -filters[static_cast<std::size_t>(i)]);
    }
}

TEST_CASE("whitening filters do not depend on the order of the images, and fewer are the first") {
    const auto size = static_cast<int>(kWindow.elems());
    const std::vector<float> all = moments(false).whitening_filters(2 * size, kScale, kShift);
    CHECK(moments(true).whitening_filters(2 * size, kScale, kShift) == all);
    const std::vector<float> five = moments(false).whitening_filters(5, kScale, kShift);
    REQUIRE(five.size() == static_cast<std::size_t>(5 * size));
    for (std::size_t i = 0; i < five.size(); ++i) {  // three components, and the negatives of two
        const std::size_t three = static_cast<std::size_t>(3 * size);
        CHECK(five[i] == (i < three ? all[i] : -all[i - three]));
    }
}
