// Decodes PNG, JPEG and WebP files.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

namespace gyre::data {

struct Picture {
    int channels = 0, height = 0, width = 0;
    std::vector<std::uint8_t> pixels;  // [height][width][channels]
};

// Where a picture is: in a file of its own, or in a part of one, such as a tar file.
struct PictureFile {
    std::string file;         // a path; there may be millions
    std::string member = {};  // its name in the file; empty: all of the file is the picture
    std::uint64_t offset = 0, bytes = 0;  // of a member

    std::string name() const { return member.empty() ? file : file + "/" + member; }
};

// Say whether a file's name has the extension of a picture that can be decoded, and of one that
// cannot.
bool is_picture_name(const std::filesystem::path& path);
bool is_other_picture_name(const std::filesystem::path& path);

// Returns one channel for a grey picture, 3 (red, green, blue) for a coloured one or if `colour` is
// set. Transparency and orientation are dropped, 16 bits cut to 8, and CMYK becomes RGB, as by
// PIL's convert("RGB"). WebP counts as coloured. The file's first bytes decide, not its name.
// Throws input_error if it cannot be read, is not PNG, JPEG or WebP, is damaged, has more than 2^28
// pixels, or if this build lacks the library.
Picture decode_picture(const PictureFile& file, bool colour);

}  // namespace gyre::data
