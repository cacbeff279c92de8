#include "data/idx.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <bit>
#include <memory>
#include <optional>
#include <string_view>

#include "base/error.hpp"
#include "data/decompress.hpp"

namespace gyre::data {
namespace {

namespace fs = std::filesystem;

// Returns 0 for a byte that is not an IDX type.
std::size_t type_bytes(unsigned type) {
    switch (static_cast<IdxType>(type)) {
        case IdxType::u8:
        case IdxType::i8:
            return 1;
        case IdxType::i16:
            return 2;
        case IdxType::i32:
        case IdxType::f32:
            return 4;
        case IdxType::f64:
            return 8;
    }
    return 0;
}

// Returns the product, or nothing if it does not fit.
std::optional<std::int64_t> checked_product(const std::vector<std::int64_t>& factors) {
    if (std::find(factors.begin(), factors.end(), 0) != factors.end()) {
        return 0;  // checked first, so that an overflow before the zero does not matter
    }
    std::int64_t product = 1;
    for (const std::int64_t factor : factors) {
        if (__builtin_mul_overflow(product, factor, &product)) {
            return std::nullopt;
        }
    }
    return product;
}

std::optional<std::int64_t> checked_payload_bytes(const std::vector<std::int64_t>& dims,
                                                  std::size_t elem_bytes) {
    std::vector<std::int64_t> factors = dims;
    factors.push_back(static_cast<std::int64_t>(elem_bytes));
    return checked_product(factors);
}

// Guesses what a file that does not start like IDX is; returns "; hint".
std::string magic_hint(const std::array<unsigned char, 4>& head) {
    struct Hint {
        std::string_view start;
        std::string_view text;
    };
    static constexpr std::array hints{
        Hint{"\x1f\x8b", "gzip data inside: compressed twice? decompress it once"},
        Hint{"\xfd\x37zX", "xz data inside: compressed twice? decompress it once"},
        Hint{"PK\x03\x04", "it looks like a zip archive: unpack it first"},
        Hint{"BZh", "it looks like bzip2: decompress it first"},
        Hint{"\x28\xb5\x2f\xfd", "it looks like zstd: decompress it first"},
        Hint{"\x93NUM", "it looks like a NumPy array: give it a name that ends in .npy"},
        Hint{"<", "it looks like a web page: a failed download? download it again"},
        Hint{"vers", "it looks like a Git LFS pointer: run `git lfs pull`"},
    };
    const std::string_view start(reinterpret_cast<const char*>(head.data()), head.size());
    for (const Hint& hint : hints) {
        if (start.starts_with(hint.start)) {
            return fmt::format("; {}", hint.text);
        }
    }
    if (head[2] == 0 && head[3] == 0 && type_bytes(head[1]) != 0) {
        return "; it looks little-endian: IDX is big-endian";
    }
    return "; is this an IDX file?";
}

void swap_if_little_endian(std::vector<std::byte>& payload, std::size_t elem_bytes) {
    if (std::endian::native == std::endian::big || elem_bytes == 1) {
        return;
    }
    for (std::byte* elem = payload.data(); elem != payload.data() + payload.size();
         elem += elem_bytes) {
        std::reverse(elem, elem + elem_bytes);
    }
}

[[noreturn]] void fail_at(const Source& source, std::int64_t offset, std::string_view what) {
    throw input_error(
        fmt::format("{}: byte offset {} of the IDX data: {}", source.name(), offset, what));
}

// Reads type and dims into `array`.
void read_header(Source& source, IdxArray& array) {
    std::array<unsigned char, 16> header{};
    auto* const bytes = reinterpret_cast<std::byte*>(header.data());
    const std::size_t magic_bytes = source.read(bytes, 4);
    if (magic_bytes == 0) {
        fail_at(source, 0,
                "expected an IDX header, found no data: the file is empty; download it again");
    }
    if (magic_bytes < 4) {
        fail_at(source, static_cast<std::int64_t>(magic_bytes),
                "truncated header: expected at least 8 bytes, found the end of the data");
    }
    if (header[0] != 0 || header[1] != 0) {
        fail_at(source, 0,
                fmt::format("wrong magic: expected 00 00, a type byte and the number of "
                            "dimensions, found {:02x} {:02x} {:02x} {:02x}{}",
                            header[0], header[1], header[2], header[3],
                            magic_hint({header[0], header[1], header[2], header[3]})));
    }
    if (type_bytes(header[2]) == 0) {
        fail_at(source, 2,
                fmt::format("unknown type: expected 08 (u8), 09 (i8), 0b (i16), 0c (i32), 0d (f32) "
                            "or 0e (f64), found {:02x}",
                            header[2]));
    }
    array.type = static_cast<IdxType>(header[2]);
    const std::size_t dims_elems = header[3];
    if (dims_elems < 1 || dims_elems > 4) {
        fail_at(source, 3, fmt::format("expected 1 to 4 dimensions, found {}", dims_elems));
    }
    const std::size_t sizes_bytes = source.read(bytes, 4 * dims_elems);
    if (sizes_bytes < 4 * dims_elems) {
        fail_at(source, static_cast<std::int64_t>(4 + sizes_bytes),
                fmt::format("truncated header: expected {} bytes for {} dimensions, found the end "
                            "of the data",
                            4 + 4 * dims_elems, dims_elems));
    }
    for (std::size_t dim = 0; dim < dims_elems; ++dim) {
        std::int64_t size = 0;
        for (std::size_t byte = 0; byte < 4; ++byte) {
            size = size * 256 + header[4 * dim + byte];
        }
        array.dims.push_back(size);
    }
}

[[noreturn]] void fail_truncated(const Source& source, const IdxArray& array,
                                 std::int64_t payload_bytes, std::int64_t found_bytes) {
    fail_at(source, array.header_bytes() + found_bytes,
            fmt::format("truncated payload: expected {} bytes ({} elements of {} bytes) after the "
                        "header, found the end of the data after {}; download or copy the file "
                        "again",
                        payload_bytes, format_dims(array.dims), array.elem_bytes(), found_bytes));
}

}  // namespace

std::int64_t IdxArray::elems() const {
    return checked_product(dims).value();
}

std::size_t IdxArray::elem_bytes() const {
    return type_bytes(static_cast<unsigned>(type));
}

std::string format_dims(const std::vector<std::int64_t>& dims) {
    std::string text;
    for (const std::int64_t dim : dims) {
        text += fmt::format("{}{}", text.empty() ? "" : "x", dim);
    }
    return text;
}

IdxArray read_idx(const fs::path& path) {
    const std::unique_ptr<Source> source = open_source(path);
    IdxArray array;
    read_header(*source, array);
    const auto payload_bytes = checked_payload_bytes(array.dims, array.elem_bytes());
    if (!payload_bytes) {
        fail_at(*source, 4,
                fmt::format("expected sizes whose product fits 63 bits, found {} elements of {} "
                            "bytes; the header is damaged",
                            format_dims(array.dims), array.elem_bytes()));
    }
    const auto file_bytes = source->known_bytes();
    if (file_bytes && *payload_bytes > *file_bytes - array.header_bytes()) {
        fail_truncated(*source, array, *payload_bytes, *file_bytes - array.header_bytes());
    }

    // For compressed data the header's size is only a claim, so memory grows with what has really
    // been decoded.
    const auto wanted_bytes = static_cast<std::size_t>(*payload_bytes);
    constexpr std::size_t first_step_bytes = std::size_t{1} << 20U;
    std::size_t done_bytes = 0;
    while (done_bytes < wanted_bytes) {
        const std::size_t step_bytes =
            file_bytes
                ? wanted_bytes
                : std::min(wanted_bytes - done_bytes, std::max(first_step_bytes, done_bytes));
        array.payload.resize(done_bytes + step_bytes);
        const std::size_t got_bytes = source->read(array.payload.data() + done_bytes, step_bytes);
        done_bytes += got_bytes;
        if (got_bytes < step_bytes) {
            fail_truncated(*source, array, *payload_bytes, static_cast<std::int64_t>(done_bytes));
        }
    }

    // Also makes the decompressor reach and verify the checksum at the end.
    std::byte extra{};
    if (source->read(&extra, 1) != 0) {
        const std::int64_t end_offset = array.header_bytes() + *payload_bytes;
        fail_at(*source, end_offset,
                fmt::format("trailing bytes: expected the end of the data after {} elements of {} "
                            "bytes, found {} more; the header or the file is damaged",
                            format_dims(array.dims), array.elem_bytes(),
                            file_bytes ? fmt::format("{} bytes", *file_bytes - end_offset)
                                       : std::string("at least 1 byte")));
    }
    swap_if_little_endian(array.payload, array.elem_bytes());
    return array;
}

}  // namespace gyre::data
