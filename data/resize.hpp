// Resizes images, and cuts out their middle.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "data/dataset.hpp"

namespace gyre::data {

// Resizes an image [height][width][channels] as Pillow's Image.resize with Resampling.BILINEAR
// does: with a triangle filter as wide as the pixels that become one, so that no pixel is skipped
// when an image shrinks. Integer arithmetic gives the same bytes on every machine. The middle is
// that of torchvision's CenterCrop.
std::vector<std::uint8_t> resize_image(const std::uint8_t* pixels, int channels, int height,
                                       int width, const Resize& to);

// Resizes all images of a set.
void resize_images(ImageSet& set, const Resize& to);

// Reads "64x48", "256,centercrop224" or "256,centercrop224x160". Returns what is wrong with it, or
// nothing.
std::string read_resize(const std::string& text, Resize& to);
std::string resize_text(const Resize& to);

}  // namespace gyre::data
