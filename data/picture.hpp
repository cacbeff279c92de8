// Decoding a PNG or JPEG file.
#pragma once

#include <cstdint>
#include <filesystem>
#include <vector>

namespace gyre::data {

struct Picture {
    int channels = 0, height = 0, width = 0;
    std::vector<std::uint8_t> pixels;  // [height][width][channels]
};

// Whether a file's name ends as those of pictures do that can be decoded; and as those of others
// do.
bool is_picture_name(const std::filesystem::path& path);
bool is_other_picture_name(const std::filesystem::path& path);

// One channel for a grey picture, 3 (red, green, blue) for another one or where `colour` is wanted.
// What a file says of transparency, orientation and 16 bits is dropped, as by PIL's convert("RGB").
// Its first bytes decide, not its name. Throws input_error: it cannot be read, is neither, is
// damaged or of more than 2^28 pixels, or this build lacks the library.
Picture decode_picture(const std::filesystem::path& path, bool colour);

}  // namespace gyre::data
