// Filters of a first convolution that whiten the windows it reads: as many of their principal
// components, each divided by its standard deviation, and the negatives of these, since an
// activation follows. K. Jordan, "94% on CIFAR-10 in 3.29 Seconds on a Single GPU", 2024; D. Page,
// "How to Train Your ResNet 8: Bag of Tricks", 2019.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/ops/shapes.hpp"

namespace gyre::model {

// A convolution's window over all channels of the images.
struct WindowShape {
    int channels = 1, height = 1, width = 1;
    std::int64_t elems() const { return std::int64_t{channels} * height * width; }
};

// The second moments of the windows of images of bytes, in integers: the same for any order of the
// images.
class WindowMoments {
 public:
    explicit WindowMoments(const WindowShape& window);

    // pixels [channels][height][width], at least as large as the window.
    void add(const std::uint8_t* pixels, const Shape& shape);
    std::int64_t windows() const { return windows_; }

    // Filters [filters][window], filters <= 2 * window.elems(), for images whose channels are
    // normalised as byte * scale + shift: the components of the largest moments, and from the
    // middle on their negatives. Each is divided by sqrt(moment + 0.0005).
    std::vector<float> whitening_filters(int filters, const std::vector<float>& scale,
                                         const std::vector<float>& shift) const;

 private:
    WindowShape window_;
    std::int64_t windows_ = 0;
    std::vector<std::int64_t> sums_;      // [window]
    std::vector<std::int64_t> products_;  // [window][window], the upper triangle
};

}  // namespace gyre::model
