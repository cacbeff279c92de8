#include "data/picture.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <string>
#include <string_view>

#if GYRE_HAVE_PNG
#include <png.h>
#endif
#if GYRE_HAVE_JPEG
#include <jpeglib.h>
// after jpeglib.h
#include <jerror.h>

#include <csetjmp>
#endif
#if GYRE_HAVE_WEBP
#include <webp/decode.h>
#endif

#include "base/error.hpp"
#include "data/decompress.hpp"

namespace gyre::data {
namespace {

namespace fs = std::filesystem;

using Bytes = std::vector<unsigned char>;

[[maybe_unused]] constexpr std::int64_t kMostPixels = std::int64_t{1} << 28;

[[noreturn]] void refuse(const fs::path& path, std::string_view what) {
    throw input_error(fmt::format("{}: {}", path.string(), what));
}

[[noreturn, maybe_unused]] void fail_damaged(const fs::path& path, std::string_view kind,
                                             std::string_view what) {
    refuse(path,
           fmt::format("expected an intact {} picture, found damage: {}; copy the file again, or "
                       "remove it",
                       kind, what));
}

[[maybe_unused]] void check_size(const fs::path& path, std::int64_t width, std::int64_t height) {
    if (width < 1 || height < 1 || width > kMostPixels / height) {
        refuse(path, fmt::format("expected 1 to {} pixels, found {}x{} (height x width)",
                                 kMostPixels, height, width));
    }
}

#if GYRE_HAVE_PNG
Picture decode_png(const fs::path& path, const Bytes& bytes, bool colour) {
    png_image image{};
    image.version = PNG_IMAGE_VERSION;
    const auto fail_with = [&] {
        const std::string what = image.message;
        png_image_free(&image);
        fail_damaged(path, "PNG", what);
    };
    if (png_image_begin_read_from_memory(&image, bytes.data(), bytes.size()) == 0) {
        fail_with();
    }
    if (std::int64_t{image.width} * image.height > kMostPixels) {
        const std::int64_t width = image.width, height = image.height;
        png_image_free(&image);
        check_size(path, width, height);
    }
    image.flags |= PNG_IMAGE_FLAG_16BIT_sRGB;
    colour = colour || (image.format & PNG_FORMAT_FLAG_COLOR) != 0;
    const bool alpha = (image.format & PNG_FORMAT_FLAG_ALPHA) != 0;
    image.format = colour ? (alpha ? PNG_FORMAT_RGBA : PNG_FORMAT_RGB)
                          : (alpha ? PNG_FORMAT_GA : PNG_FORMAT_GRAY);
    Picture picture;
    picture.channels = colour ? 3 : 1;
    picture.height = static_cast<int>(image.height);
    picture.width = static_cast<int>(image.width);
    picture.pixels.resize(PNG_IMAGE_SIZE(image));
    if (png_image_finish_read(&image, nullptr, picture.pixels.data(), 0, nullptr) == 0) {
        fail_with();
    }
    if (alpha) {
        const auto kept = static_cast<std::size_t>(picture.channels);
        const std::size_t pixels = picture.pixels.size() / (kept + 1);
        for (std::size_t i = 0; i < pixels; ++i) {
            std::memmove(&picture.pixels[i * kept], &picture.pixels[i * (kept + 1)], kept);
        }
        picture.pixels.resize(pixels * kept);
    }
    return picture;
}
#endif

#if GYRE_HAVE_JPEG
// Converts a row of inks, [pixels][4], to red, green and blue, [pixels][3]. 255 means no ink, as in
// JPEG files. It does as PIL, which takes no account of what the inks look like on paper.
void colours_of_inks(const std::uint8_t* inks, std::size_t pixels, std::uint8_t* colours) {
    for (std::size_t i = 0; i < pixels; ++i) {
        const int light = inks[4 * i + 3];  // that black lets through
        for (std::size_t c = 0; c < 3; ++c) {
            const int product = (255 - inks[4 * i + c]) * light + 128;
            const int taken = ((product >> 8) + product) >> 8;  // product / 255, rounded
            colours[3 * i + c] = static_cast<std::uint8_t>(std::max(0, light - taken));
        }
    }
}

// libjpeg reports errors by longjmp, which must not skip a destructor: so every object that has one
// is a member here, and read() has no such local.
class JpegReader {
 public:
    JpegReader() {
        info_.err = jpeg_std_error(&errors_.base);
        errors_.base.error_exit = [](j_common_ptr info) {
            auto* errors = reinterpret_cast<Errors*>(info->err);
            (*info->err->format_message)(info, errors->text);
            std::longjmp(errors->at, 1);
        };
        errors_.base.emit_message = [](j_common_ptr info, int level) {
            // PIL and torchvision also ignore all warnings except this one.
            if (level < 0 && info->err->msg_code == JWRN_JPEG_EOF) {
                (*info->err->error_exit)(info);
            }
        };
    }
    ~JpegReader() { jpeg_destroy_decompress(&info_); }
    JpegReader(const JpegReader&) = delete;
    JpegReader& operator=(const JpegReader&) = delete;

    // Both return false if the file is damaged; text() says how.
    bool start(const Bytes& bytes) {
        if (setjmp(errors_.at) != 0) {
            return false;
        }
        jpeg_create_decompress(&info_);
        jpeg_mem_src(&info_, bytes.data(), bytes.size());
        jpeg_read_header(&info_, TRUE);
        return true;
    }
    bool read(int channels, std::uint8_t* pixels) {
        const bool inks = in_inks();
        ink_row_.resize(inks ? std::size_t{info_.image_width} * 4 : 0);
        if (setjmp(errors_.at) != 0) {
            return false;
        }
        info_.out_color_space = inks ? JCS_CMYK : channels == 1 ? JCS_GRAYSCALE : JCS_RGB;
        jpeg_start_decompress(&info_);
        const std::size_t row_bytes =
            std::size_t{info_.output_width} * static_cast<std::size_t>(channels);
        while (info_.output_scanline < info_.output_height) {
            std::uint8_t* const to = pixels + std::size_t{info_.output_scanline} * row_bytes;
            JSAMPROW row = inks ? ink_row_.data() : to;
            jpeg_read_scanlines(&info_, &row, 1);
            if (inks) {
                colours_of_inks(ink_row_.data(), info_.output_width, to);
            }
        }
        jpeg_finish_decompress(&info_);
        return true;
    }
    const jpeg_decompress_struct& info() const { return info_; }
    // True if the picture's colours are those of printing: cyan, magenta, yellow and black.
    bool in_inks() const {
        return info_.jpeg_color_space == JCS_CMYK || info_.jpeg_color_space == JCS_YCCK;
    }
    std::string_view text() const { return errors_.text; }

 private:
    struct Errors {
        jpeg_error_mgr base;
        std::jmp_buf at;
        char text[JMSG_LENGTH_MAX];
    };
    jpeg_decompress_struct info_{};
    Errors errors_{};
    Bytes ink_row_;
};

Picture decode_jpeg(const fs::path& path, const Bytes& bytes, bool colour) {
    JpegReader reader;
    if (!reader.start(bytes)) {
        fail_damaged(path, "JPEG", reader.text());
    }
    const auto& info = reader.info();
    check_size(path, info.image_width, info.image_height);
    Picture picture;
    picture.channels = colour || info.jpeg_color_space != JCS_GRAYSCALE ? 3 : 1;
    picture.height = static_cast<int>(info.image_height);
    picture.width = static_cast<int>(info.image_width);
    picture.pixels.resize(std::size_t{info.image_height} * info.image_width *
                          static_cast<std::size_t>(picture.channels));
    if (!reader.read(picture.channels, picture.pixels.data())) {
        fail_damaged(path, "JPEG", reader.text());
    }
    return picture;
}
#endif

#if GYRE_HAVE_WEBP
Picture decode_webp(const fs::path& path, const Bytes& bytes) {
    WebPBitstreamFeatures found;
    if (WebPGetFeatures(bytes.data(), bytes.size(), &found) != VP8_STATUS_OK) {
        fail_damaged(path, "WebP", "its header");
    }
    check_size(path, found.width, found.height);
    if (found.has_animation != 0) {
        refuse(path, "expected a WebP picture, found an animation; convert one of its frames");
    }
    Picture picture{3, found.height, found.width, {}};
    const int row_bytes = 3 * found.width;
    picture.pixels.resize(static_cast<std::size_t>(row_bytes) *
                          static_cast<std::size_t>(found.height));
    if (WebPDecodeRGBInto(bytes.data(), bytes.size(), picture.pixels.data(), picture.pixels.size(),
                          row_bytes) == nullptr) {
        fail_damaged(path, "WebP", "its pixels");
    }
    return picture;
}
#endif

#if !GYRE_HAVE_PNG || !GYRE_HAVE_JPEG || !GYRE_HAVE_WEBP
[[noreturn]] void fail_missing(const fs::path& path, const char* kind, const char* package) {
    refuse(path,
           fmt::format("this build cannot read {} pictures; install {} (scripts/setup.sh does) and "
                       "build again",
                       kind, package));
}
#endif
#if !GYRE_HAVE_PNG
Picture decode_png(const fs::path& path, const Bytes&, bool) {
    fail_missing(path, "PNG", "libpng-dev");
}
#endif
#if !GYRE_HAVE_JPEG
Picture decode_jpeg(const fs::path& path, const Bytes&, bool) {
    fail_missing(path, "JPEG", "libjpeg-dev");
}
#endif
#if !GYRE_HAVE_WEBP
Picture decode_webp(const fs::path& path, const Bytes&) {
    fail_missing(path, "WebP", "libwebp-dev");
}
#endif

Bytes read_file(const PictureFile& picture) {
    const FileHandle file(std::fopen(picture.file.c_str(), "rb"));
    std::error_code error;
    const std::uintmax_t bytes = !file                    ? 0
                                 : picture.member.empty() ? fs::file_size(picture.file, error)
                                                          : picture.bytes;
    if (!file || error) {
        refuse(picture.name(),
               fmt::format("cannot read: {}", file ? error.message() : errno_text(errno)));
    }
    Bytes all(bytes);
    const bool sought = fseeko(file.get(), static_cast<off_t>(picture.offset), SEEK_SET) == 0;
    all.resize(sought ? std::fread(all.data(), 1, all.size(), file.get()) : 0);
    if (!sought || std::ferror(file.get()) != 0) {
        refuse(picture.name(), fmt::format("cannot read: {}", errno_text(errno)));
    }
    return all;
}

bool ends_as_one_of(const fs::path& path, std::initializer_list<std::string_view> ends) {
    std::string end = path.extension().string();
    for (char& c : end) {
        c = c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c;
    }
    return std::find(ends.begin(), ends.end(), end) != ends.end();
}

}  // namespace

bool is_picture_name(const fs::path& path) {
    return ends_as_one_of(path, {".png", ".jpg", ".jpeg", ".webp"});
}

bool is_other_picture_name(const fs::path& path) {
    return ends_as_one_of(path, {".bmp", ".gif", ".pgm", ".ppm", ".tif", ".tiff"});
}

Picture decode_picture(const PictureFile& file, bool colour) {
    const Bytes bytes = read_file(file);
    const fs::path path = file.name();
    const std::string_view start(reinterpret_cast<const char*>(bytes.data()),
                                 std::min<std::size_t>(bytes.size(), 12));
    if (start.starts_with("\x89PNG")) {
        return decode_png(path, bytes, colour);
    }
    if (start.starts_with("\xff\xd8")) {
        return decode_jpeg(path, bytes, colour);
    }
    if (start.starts_with("RIFF") && start.ends_with("WEBP")) {
        return decode_webp(path, bytes);
    }
    refuse(path, bytes.empty()
                     ? "expected a PNG, JPEG or WebP picture, found an empty file; remove it"
                     : "expected a PNG, JPEG or WebP picture, found something else; convert it, "
                       "or remove it");
}

}  // namespace gyre::data
