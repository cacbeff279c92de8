// Reader and writer of IDX files, the format of MNIST and its relatives.
//
// Layout, all big-endian: two zero bytes, a type byte, the number of dimensions (1 to 4), one
// unsigned 32-bit size per dimension, then the elements with the last dimension fastest.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

namespace gyre::data {

enum class IdxType : std::uint8_t {
    u8 = 0x08,
    i8 = 0x09,
    i16 = 0x0B,
    i32 = 0x0C,
    f32 = 0x0D,
    f64 = 0x0E
};

// An array of `type` with 1 to 4 dimensions, each in [0, 2^32). `payload` holds elems() elements of
// elem_bytes() bytes each in the machine's byte order, last dimension fastest.
struct IdxArray {
    IdxType type = IdxType::u8;
    std::vector<std::int64_t> dims;
    std::vector<std::byte> payload;

    std::int64_t elems() const;      // product of dims
    std::size_t elem_bytes() const;  // 1, 2, 4 or 8
    // Offset of the first element from the start of the (decompressed) IDX data.
    std::int64_t header_bytes() const { return 4 + 4 * static_cast<std::int64_t>(dims.size()); }
};

// "60000x28x28", for messages.
std::string format_dims(const std::vector<std::int64_t>& dims);

// Reads an IDX file that is plain, gzip or xz; its first bytes decide, not its name. Throws
// input_error if the file cannot be read, is damaged, or is not exactly one IDX array; the message
// gives the file, the byte offset, what was expected and what was found. Offsets "of the IDX data"
// count decompressed bytes; those "of the gzip/xz file" count bytes on disk.
IdxArray read_idx(const std::filesystem::path& path);

}  // namespace gyre::data
