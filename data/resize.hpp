// Images of another size.
#pragma once

#include <cstdint>
#include <vector>

#include "data/dataset.hpp"

namespace gyre::data {

// An image [height][width][channels] in another size, as Pillow's Image.resize with
// Resampling.BILINEAR: a triangle filter as wide as the pixels that become one, so that nothing is
// skipped where an image shrinks. In integers: the same bytes on every machine.
std::vector<std::uint8_t> resize_image(const std::uint8_t* pixels, int channels, int height,
                                       int width, ImageSize size);

// All images of a set.
void resize_images(ImageSet& set, ImageSize size);

}  // namespace gyre::data
