// Writes pictures and folders of pictures for tests.
#pragma once

#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <stdexcept>
#include <string>
#include <vector>

#if GYRE_HAVE_PNG
#include <png.h>
#endif
#if GYRE_HAVE_JPEG
#include <jpeglib.h>
#endif
#if GYRE_HAVE_WEBP
#include <webp/encode.h>
#endif

namespace gyre::test {

using Bytes = std::vector<std::uint8_t>;

#if GYRE_HAVE_PNG
// pixels [height][width][channels]; channels 1 (grey), 2 (grey, alpha), 3 or 4 (with alpha).
inline void write_png(const std::filesystem::path& path, int channels, int height, int width,
                      const Bytes& pixels) {
    png_image image{};
    image.version = PNG_IMAGE_VERSION;
    image.width = static_cast<png_uint_32>(width);
    image.height = static_cast<png_uint_32>(height);
    constexpr png_uint_32 formats[] = {PNG_FORMAT_GRAY, PNG_FORMAT_GA, PNG_FORMAT_RGB,
                                       PNG_FORMAT_RGBA};
    image.format = formats[channels - 1];
    std::filesystem::create_directories(path.parent_path());
    if (png_image_write_to_file(&image, path.c_str(), 0, pixels.data(), 0, nullptr) == 0) {
        throw std::runtime_error("cannot write " + path.string());
    }
}
#endif

#if GYRE_HAVE_JPEG
// Writes a picture whose pixels are all this one, [channels]; 4: CMYK, as it is or as YCCK.
inline void write_jpeg(const std::filesystem::path& path, int height, int width, const Bytes& pixel,
                       bool ycck = false) {
    const auto channels = static_cast<int>(pixel.size());
    std::filesystem::create_directories(path.parent_path());
    std::FILE* file = std::fopen(path.c_str(), "wb");
    if (file == nullptr) {
        throw std::runtime_error("cannot write " + path.string());
    }
    jpeg_compress_struct info{};
    jpeg_error_mgr errors{};
    info.err = jpeg_std_error(&errors);
    jpeg_create_compress(&info);
    jpeg_stdio_dest(&info, file);
    info.image_width = static_cast<JDIMENSION>(width);
    info.image_height = static_cast<JDIMENSION>(height);
    info.input_components = channels;
    info.in_color_space = channels == 1 ? JCS_GRAYSCALE : channels == 3 ? JCS_RGB : JCS_CMYK;
    jpeg_set_defaults(&info);
    if (ycck) {
        jpeg_set_colorspace(&info, JCS_YCCK);
    }
    jpeg_set_quality(&info, 100, TRUE);
    jpeg_start_compress(&info, TRUE);
    Bytes row;
    for (int i = 0; i < width; ++i) {
        row.insert(row.end(), pixel.begin(), pixel.end());
    }
    for (int i = 0; i < height; ++i) {
        JSAMPROW at = row.data();
        jpeg_write_scanlines(&info, &at, 1);
    }
    jpeg_finish_compress(&info);
    jpeg_destroy_compress(&info);
    std::fclose(file);
}
inline void write_jpeg(const std::filesystem::path& path, int channels, int height, int width,
                       std::uint8_t value) {
    write_jpeg(path, height, width, Bytes(static_cast<std::size_t>(channels), value));
}
#endif

#if GYRE_HAVE_WEBP
// pixels [height][width][3], which are kept as they are.
inline void write_webp(const std::filesystem::path& path, int height, int width,
                       const Bytes& pixels) {
    std::uint8_t* bytes = nullptr;
    const std::size_t count =
        WebPEncodeLosslessRGB(pixels.data(), width, height, 3 * width, &bytes);
    std::filesystem::create_directories(path.parent_path());
    std::ofstream file(path, std::ios::binary);
    file.write(reinterpret_cast<const char*>(bytes), static_cast<std::streamsize>(count));
    WebPFree(bytes);
    if (count == 0 || !file.flush()) {
        throw std::runtime_error("cannot write " + path.string());
    }
}
#endif

// Returns the bytes first, first + 1, ...
inline Bytes counted(int count, int first = 0) {
    Bytes bytes;
    for (int i = 0; i < count; ++i) {
        bytes.push_back(static_cast<std::uint8_t>(first + i));
    }
    return bytes;
}

}  // namespace gyre::test
