// Data sets in NumPy's .npy files (numpy.lib.format, versions 1 to 3).
#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <charconv>
#include <cstring>
#include <limits>
#include <string_view>

#include "base/error.hpp"
#include "data/decompress.hpp"
#include "data/formats.hpp"
#include "data/idx.hpp"

namespace gyre::data {
namespace {

namespace fs = std::filesystem;

struct NpyFile {
    std::string path;
    std::string type;  // "u1", "i8": kind and bytes of an element
    std::vector<std::int64_t> dims;
    std::size_t header_bytes = 0;  // before the elements
    std::size_t elem_bytes = 1, elems = 1;
};

[[noreturn]] void fail(const std::string& path, const std::string& what) {
    throw input_error(fmt::format("{}: {}", path, what));
}

// Returns the text after 'KEY': in the header's dictionary.
std::string_view entry(const std::string& path, std::string_view header, std::string_view key) {
    const std::size_t at = header.find(fmt::format("'{}':", key));
    if (at == header.npos) {
        fail(path,
             fmt::format("its header has no '{}'; write the file again with numpy.save", key));
    }
    header.remove_prefix(at + key.size() + 3);
    header.remove_prefix(std::min(header.find_first_not_of(' '), header.size()));
    return header;
}

std::vector<std::int64_t> parse_dims(const std::string& path, std::string_view text) {
    std::vector<std::int64_t> dims;
    const std::size_t end = text.find(')');
    bool good = text.starts_with('(') && end != text.npos;
    for (std::size_t at = 1; good && at < end;) {
        if (text[at] == ' ' || text[at] == ',' || text[at] == 'L') {
            ++at;
            continue;
        }
        std::int64_t dim = 0;
        const auto result = std::from_chars(text.data() + at, text.data() + end, dim);
        good = result.ec == std::errc{} && dim >= 0;
        dims.push_back(dim);
        at = static_cast<std::size_t>(result.ptr - text.data());
    }
    if (!good) {
        fail(path, "its header's 'shape' cannot be read; write the file again with numpy.save");
    }
    return dims;
}

// Computes file.elems; throws if the elements are not exactly the rest of the file.
void check_size(NpyFile& file, std::int64_t file_bytes) {
    const std::int64_t rest = file_bytes - static_cast<std::int64_t>(file.header_bytes);
    std::int64_t bytes = static_cast<std::int64_t>(file.elem_bytes);
    for (const std::int64_t dim : file.dims) {
        if (dim != 0 && bytes > std::numeric_limits<std::int64_t>::max() / dim) {
            fail(file.path, fmt::format("its shape {} is damaged", format_dims(file.dims)));
        }
        bytes *= dim;
    }
    if (bytes != rest) {
        fail(file.path,
             fmt::format("expected {} bytes of elements for shape {} of {}, found {}: the file is "
                         "{}; copy it again, or write it again with numpy.save",
                         bytes, format_dims(file.dims), file.type, rest,
                         rest < bytes ? "truncated" : "damaged"));
    }
    file.elems = static_cast<std::size_t>(bytes) / file.elem_bytes;
}

NpyFile open_npy(const fs::path& path) {
    NpyFile file;
    file.path = path.string();
    const std::unique_ptr<Source> source = open_source(path);
    if (!source->known_bytes()) {
        fail(file.path, "the file is compressed; unpack it first");
    }
    unsigned char start[12] = {};
    const std::size_t got = source->read(reinterpret_cast<std::byte*>(start), 10);
    if (got < 10 || std::memcmp(start, "\x93NUMPY", 6) != 0 || start[6] < 1 || start[6] > 3) {
        fail(file.path, "expected NumPy's format, version 1 to 3; write the file with numpy.save");
    }
    std::size_t text_bytes = start[8] | std::size_t{start[9]} << 8U;
    file.header_bytes = 10;
    if (start[6] > 1) {
        source->read(reinterpret_cast<std::byte*>(start + 10), 2);
        text_bytes |= std::size_t{start[10]} << 16U | std::size_t{start[11]} << 24U;
        file.header_bytes = 12;
    }
    constexpr std::size_t most_header_bytes = 65536;
    std::string header(std::min(text_bytes, most_header_bytes), '\0');
    if (text_bytes > most_header_bytes ||
        source->read(reinterpret_cast<std::byte*>(header.data()), text_bytes) != text_bytes) {
        fail(file.path, "its header is truncated; write the file again with numpy.save");
    }
    file.header_bytes += text_bytes;
    std::string_view type = entry(file.path, header, "descr");
    type = type.substr(0, type.find(',', 1));
    if (type.size() < 5 || type[0] != '\'' || type.back() != '\'' || type[1] == '>' ||
        type.size() > 8) {
        fail(file.path, fmt::format("elements of type {}: expected little-endian integers; "
                                    "write the file again with numpy.save(…, array.astype(\"{}\"))",
                                    type, "<i8"));
    }
    file.type = type.substr(2, type.size() - 3);
    if (!entry(file.path, header, "fortran_order").starts_with("False")) {
        fail(file.path,
             "the array is in Fortran order; write it again with numpy.save(…, "
             "numpy.ascontiguousarray(array))");
    }
    file.dims = parse_dims(file.path, entry(file.path, header, "shape"));
    const std::string_view digits = std::string_view(file.type).substr(1);
    std::from_chars(digits.data(), digits.data() + digits.size(), file.elem_bytes);
    file.elem_bytes = std::max(file.elem_bytes, std::size_t{1});
    check_size(file, *source->known_bytes());
    return file;
}

template <typename Int>
void copy_labels(const NpyFile& file, const ClassLimit& limit, std::vector<std::int32_t>& labels) {
    const Pixels bytes = map_pixels(file.path, file.header_bytes, file.elems * sizeof(Int));
    constexpr auto most = static_cast<std::uint64_t>(std::numeric_limits<std::int32_t>::max() - 1);
    for (std::size_t i = 0; i < file.elems; ++i) {
        Int label;
        std::memcpy(&label, bytes.data() + i * sizeof(Int), sizeof(Int));
        const bool negative = label < Int{0};
        const auto value = static_cast<std::uint64_t>(label);
        if (negative || value > most || value >= static_cast<std::uint64_t>(limit.classes)) {
            fail(file.path,
                 fmt::format("label of image {}: expected 0..{} because {}, found {}; if the label "
                             "is right, give `classes` {} or more",
                             i, limit.classes - 1, limit.reason, label,
                             negative ? 2 : std::min(value, most) + 1));
        }
        labels.push_back(static_cast<std::int32_t>(label));
    }
}

std::vector<std::int32_t> read_labels(const NpyFile& file, const ClassLimit& limit) {
    std::vector<std::int32_t> labels;
    const auto& t = file.type;
    const auto copy = t == "u1"   ? copy_labels<std::uint8_t>
                      : t == "i1" ? copy_labels<std::int8_t>
                      : t == "u2" ? copy_labels<std::uint16_t>
                      : t == "i2" ? copy_labels<std::int16_t>
                      : t == "u4" ? copy_labels<std::uint32_t>
                      : t == "i4" ? copy_labels<std::int32_t>
                      : t == "u8" ? copy_labels<std::uint64_t>
                      : t == "i8" ? copy_labels<std::int64_t>
                                  : nullptr;
    if (copy == nullptr) {
        fail(file.path, fmt::format("labels of type {}: expected integers; write them again with "
                                    "numpy.save(…, labels.astype(numpy.int64))",
                                    t));
    }
    copy(file, limit, labels);
    return labels;
}

// Reorders [N][H][W][C] to [N][C][H][W].
std::vector<std::uint8_t> planes_of(const std::uint8_t* from, const ImageSet& set) {
    const auto channels = static_cast<std::size_t>(set.channels);
    const std::size_t plane =
        static_cast<std::size_t>(set.height) * static_cast<std::size_t>(set.width);
    std::vector<std::uint8_t> pixels(static_cast<std::size_t>(set.count) * plane * channels);
    std::uint8_t* to = pixels.data();
    for (std::int64_t image = 0; image < set.count; ++image, from += plane * channels) {
        for (std::size_t c = 0; c < channels; ++c) {
            for (std::size_t i = 0; i < plane; ++i) {
                *to++ = from[i * channels + c];
            }
        }
    }
    return pixels;
}

ImageSet read_set(const fs::path& images_path, const fs::path& labels_path,
                  std::optional<int> classes, std::optional<std::int64_t> train_images) {
    const NpyFile images = open_npy(images_path), labels = open_npy(labels_path);
    const auto& dims = images.dims;
    if (images.type != "u1") {
        fail(images.path,
             fmt::format("images of type {}: expected uint8 in 0..255; write them again with "
                         "numpy.save(…, images.astype(numpy.uint8)), multiplied by 255 first if "
                         "they are in [0, 1]",
                         images.type));
    }
    if (dims.size() != 3 && dims.size() != 4) {
        fail(images.path,
             fmt::format("expected images of shape [N][H][W] or [N][H][W][C], found {}",
                         dims.empty() ? "a number" : format_dims(dims)));
    }
    if (dims.size() == 4 && dims[3] > 4 && dims[1] <= 4) {
        fail(images.path, fmt::format("images of shape {} look like [N][C][H][W], expected "
                                      "[N][H][W][C]; write them again with numpy.save(…, "
                                      "images.transpose(0, 2, 3, 1).copy())",
                                      format_dims(dims)));
    }
    constexpr std::int64_t most = std::numeric_limits<std::int32_t>::max();
    if (images.elems == 0 || dims[0] > most ||
        static_cast<std::int64_t>(images.elems) / dims[0] > most) {
        fail(images.path, fmt::format("expected 1 to {} images of 1 to {} pixels, found shape {}",
                                      most, most, format_dims(dims)));
    }
    if (labels.dims.empty() || labels.dims.size() > 2 ||
        (labels.dims.size() == 2 && labels.dims[1] != 1)) {
        fail(labels.path, fmt::format("expected labels of shape [N], found {}; convert one-hot "
                                      "rows with labels.argmax(axis=1)",
                                      format_dims(labels.dims)));
    }
    if (labels.dims[0] != dims[0]) {
        throw input_error(
            fmt::format("{} has {} images, but {} has {} labels; expected one label per image: are "
                        "they files of the same set?",
                        images.path, dims[0], labels.path, labels.dims[0]));
    }
    ImageSet set;
    set.images_path = images.path;
    set.labels_path = labels.path;
    set.count = dims[0];
    set.height = static_cast<int>(dims[1]);
    set.width = static_cast<int>(dims[2]);
    set.channels = dims.size() == 4 ? static_cast<int>(dims[3]) : 1;
    set.labels = read_labels(labels, class_limit(classes, train_images.value_or(set.count)));
    set.pixels = map_pixels(images_path, images.header_bytes, images.elems);
    if (set.channels > 1) {
        set.pixels = planes_of(std::as_const(set.pixels).data(), set);
    }
    return set;
}

}  // namespace

Dataset load_npy(const DatasetFiles& files, std::optional<int> classes) {
    static_assert(std::endian::native == std::endian::little);
    Dataset set;
    set.train = read_set(files.train_images, files.train_labels, classes, {});
    set.test = read_set(files.test_images, files.test_labels, classes, set.train.count);
    return set;
}

}  // namespace gyre::data
