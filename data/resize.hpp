// Resizes images.
#pragma once

#include <cstdint>
#include <vector>

#include "data/dataset.hpp"

namespace gyre::data {

// Resizes an image [height][width][channels] as Pillow's Image.resize with Resampling.BILINEAR
// does: with a triangle filter as wide as the pixels that become one, so that no pixel is skipped
// when an image shrinks. Integer arithmetic gives the same bytes on every machine.
std::vector<std::uint8_t> resize_image(const std::uint8_t* pixels, int channels, int height,
                                       int width, ImageSize size);

// Resizes all images of a set.
void resize_images(ImageSet& set, ImageSize size);

}  // namespace gyre::data
