#include "data/idx.hpp"

#include <lzma.h>
#include <unistd.h>
#include <zlib.h>

#include <array>
#include <bit>
#include <cstring>
#include <fstream>
#include <limits>
#include <string>
#include <utility>

#include "tests/support/catch.hpp"
#include "tests/support/expect_error.hpp"
#include "tests/support/small_dataset.hpp"
#include "tests/support/temp_dir.hpp"

using namespace gyre;
using namespace gyre::data;
using gyre::test::array_of;
using gyre::test::expect_error;
using gyre::test::file_bytes;
using gyre::test::TempDir;
using gyre::test::write_idx;
namespace fs = std::filesystem;

namespace {

enum class Compression { none, gzip, xz };
constexpr std::array all_compressions{Compression::none, Compression::gzip, Compression::xz};

std::string gzip(const std::string& data) {
    z_stream stream{};
    REQUIRE(deflateInit2(&stream, 6, Z_DEFLATED, 15 + 16, 8, Z_DEFAULT_STRATEGY) == Z_OK);
    std::string out(deflateBound(&stream, static_cast<uLong>(data.size())) + 64, '\0');
    stream.next_in = reinterpret_cast<Bytef*>(const_cast<char*>(data.data()));
    stream.avail_in = static_cast<uInt>(data.size());
    stream.next_out = reinterpret_cast<Bytef*>(out.data());
    stream.avail_out = static_cast<uInt>(out.size());
    REQUIRE(deflate(&stream, Z_FINISH) == Z_STREAM_END);
    out.resize(stream.total_out);
    deflateEnd(&stream);
    return out;
}

std::string xz(const std::string& data) {
    std::string out(lzma_stream_buffer_bound(data.size()), '\0');
    std::size_t out_bytes = 0;
    REQUIRE(lzma_easy_buffer_encode(6, LZMA_CHECK_CRC64, nullptr,
                                    reinterpret_cast<const std::uint8_t*>(data.data()), data.size(),
                                    reinterpret_cast<std::uint8_t*>(out.data()), &out_bytes,
                                    out.size()) == LZMA_OK);
    out.resize(out_bytes);
    return out;
}

std::string compress(const std::string& data, Compression compression) {
    switch (compression) {
        case Compression::gzip:
            return gzip(data);
        case Compression::xz:
            return xz(data);
        default:
            return data;
    }
}

void write_file(const fs::path& path, const std::string& data) {
    std::ofstream(path, std::ios::binary) << data;
}

std::string header(unsigned type, const std::vector<std::uint32_t>& dims) {
    std::string out{'\0', '\0', static_cast<char>(type), static_cast<char>(dims.size())};
    for (const std::uint32_t dim : dims) {
        for (const unsigned shift : {24U, 16U, 8U, 0U}) {
            out += static_cast<char>((dim >> shift) & 0xFFU);
        }
    }
    return out;
}

// Writes `array`, compresses the file in every way, and requires that the same is read back.
void require_round_trip(const IdxArray& array) {
    const TempDir dir;
    const fs::path path = dir.path() / "a";
    write_idx(path, array);
    const std::string plain = file_bytes(path);
    CHECK(plain.size() == static_cast<std::size_t>(array.header_bytes()) + array.payload.size());
    for (const Compression compression : all_compressions) {
        INFO("compression " << static_cast<int>(compression));
        write_file(path, compress(plain, compression));
        const IdxArray back = read_idx(path);
        CHECK(back.type == array.type);
        CHECK(back.dims == array.dims);
        CHECK(back.payload == array.payload);
    }
}

template <class T>
void require_round_trips(IdxType type) {
    const std::vector<std::vector<std::int64_t>> shapes{{24}, {4, 6}, {3, 2, 4}, {2, 3, 1, 4}};
    std::vector<T> values(24, std::numeric_limits<T>::max());
    for (std::size_t i = 2; i < values.size(); ++i) {
        values[i] = static_cast<T>(static_cast<T>(5 * i) / static_cast<T>(2));
    }
    values[1] = std::numeric_limits<T>::lowest();
    for (const auto& shape : shapes) {
        INFO("dims " << format_dims(shape));
        const IdxArray array = array_of(type, shape, values);
        CHECK(array.elems() == 24);
        CHECK(array.elem_bytes() == sizeof(T));
        require_round_trip(array);
    }
}

// Requires the same error from the same malformed IDX data in each compression.
void expect_malformed(const std::string& data, std::initializer_list<std::string> parts) {
    for (const Compression compression : all_compressions) {
        INFO("compression " << static_cast<int>(compression));
        const TempDir dir;
        const fs::path path = dir.path() / "broken-file";
        write_file(path, compress(data, compression));
        expect_error(ExitCode::bad_input, {"broken-file"}, [&] { read_idx(path); });
        expect_error(ExitCode::bad_input, parts, [&] { read_idx(path); });
    }
}

void expect_bad_file(const std::string& content, std::initializer_list<std::string> parts) {
    const TempDir dir;
    const fs::path path = dir.path() / "broken-file";
    write_file(path, content);
    expect_error(ExitCode::bad_input, {"broken-file"}, [&] { read_idx(path); });
    expect_error(ExitCode::bad_input, parts, [&] { read_idx(path); });
}

std::string good_data() {
    return header(0x08, {2, 3}) + std::string("abcdef");
}

}  // namespace

TEST_CASE("IDX: every type with 1 to 4 dimensions, plain, gzip and xz", "[data][idx]") {
    require_round_trips<std::uint8_t>(IdxType::u8);
    require_round_trips<std::int8_t>(IdxType::i8);
    require_round_trips<std::int16_t>(IdxType::i16);
    require_round_trips<std::int32_t>(IdxType::i32);
    require_round_trips<float>(IdxType::f32);
    require_round_trips<double>(IdxType::f64);
}

TEST_CASE("IDX: elements are big-endian in the file", "[data][idx]") {
    const TempDir dir;
    const fs::path path = dir.path() / "a";
    write_file(path, header(0x0B, {2}) + std::string("\x01\x02\xff\xfe", 4));
    const IdxArray array = read_idx(path);
    std::array<std::int16_t, 2> values{};
    REQUIRE(array.payload.size() == sizeof values);
    std::memcpy(values.data(), array.payload.data(), sizeof values);
    CHECK(values[0] == 0x0102);
    CHECK(values[1] == -2);

    write_file(path, header(0x0D, {1}) + std::string("\x3f\x80\x00\x00", 4));
    const IdxArray floats = read_idx(path);
    float one = 0;
    REQUIRE(floats.payload.size() == sizeof one);
    std::memcpy(&one, floats.payload.data(), sizeof one);
    CHECK(one == 1.0F);

    write_idx(path, array);
    CHECK(file_bytes(path) == header(0x0B, {2}) + std::string("\x01\x02\xff\xfe", 4));
}

TEST_CASE("IDX: a dimension of 0 is legal", "[data][idx]") {
    require_round_trip(array_of<std::uint8_t>(IdxType::u8, {0}, {}));
    require_round_trip(array_of<double>(IdxType::f64, {5, 0, 7}, {}));
    // The product before the zero would overflow.
    const std::int64_t huge = std::numeric_limits<std::uint32_t>::max();
    require_round_trip(array_of<double>(IdxType::f64, {huge, huge, huge, 0}, {}));
}

TEST_CASE("IDX: a payload larger than the buffers", "[data][idx]") {
    std::vector<std::int32_t> values(1'500'000);
    std::uint32_t state = 1;
    for (std::int32_t& value : values) {
        state = state * 1664525U + 1013904223U;
        value = static_cast<std::int32_t>(state >> 8U);
    }
    require_round_trip(array_of(IdxType::i32, {1500, 1000}, values));
}

TEST_CASE("IDX: gzip files of several members and xz files of several streams", "[data][idx]") {
    const TempDir dir;
    const fs::path path = dir.path() / "a";
    const std::string data = good_data();
    for (std::size_t split = 0; split <= data.size(); ++split) {
        write_file(path, gzip(data.substr(0, split)) + gzip(data.substr(split)));
        CHECK(read_idx(path).payload.size() == 6);
        write_file(path, xz(data.substr(0, split)) + xz(data.substr(split)));
        CHECK(read_idx(path).payload.size() == 6);
    }
}

TEST_CASE("IDX: wrong magic", "[data][idx]") {
    expect_malformed(
        std::string("\x01") + good_data(),
        {"byte offset 0 of the IDX data", "wrong magic", "expected 00 00", "found 01 00 00 08"});
    expect_malformed("<!DOCTYPE html>", {"wrong magic", "web page"});
    expect_malformed("PK\x03\x04 and so on", {"zip archive"});
    expect_malformed("BZh9 and so on", {"bzip2"});
    expect_malformed("\x28\xb5\x2f\xfd and so on", {"zstd"});
    expect_malformed("\x93NUMPY and so on", {"NumPy"});
    expect_malformed("version https://git-lfs.github.com/spec/v1", {"git lfs pull"});
    expect_malformed(std::string("\x03\x08\x00\x00\x02\x00\x00\x00", 8), {"little-endian"});
    expect_bad_file(gzip(gzip(good_data())), {"compressed twice"});
    expect_bad_file(xz(xz(good_data())), {"compressed twice"});
}

TEST_CASE("IDX: unknown type", "[data][idx]") {
    for (const unsigned type : {0x00U, 0x07U, 0x0AU, 0x0FU, 0xFFU}) {
        expect_malformed(header(type, {1}) + "x",
                         {"byte offset 2 of the IDX data", "unknown type", "expected 08 (u8)"});
    }
    expect_malformed(header(0x0A, {1}) + "x", {"found 0a"});
}

TEST_CASE("IDX: unsupported number of dimensions", "[data][idx]") {
    expect_malformed(header(0x08, {}) + "x",
                     {"byte offset 3 of the IDX data", "expected 1 to 4 dimensions", "found 0"});
    expect_malformed(header(0x08, {1, 1, 1, 1, 1}) + "x",
                     {"byte offset 3 of the IDX data", "expected 1 to 4 dimensions", "found 5"});
}

TEST_CASE("IDX: truncation at every byte", "[data][idx]") {
    const std::string data = good_data();
    expect_malformed("", {"byte offset 0 of the IDX data", "empty"});
    for (std::size_t bytes = 1; bytes < data.size(); ++bytes) {
        const std::string place = "byte offset " + std::to_string(bytes) + " of the IDX data";
        if (bytes < 12) {
            expect_malformed(data.substr(0, bytes), {place, "truncated header"});
        } else {
            expect_malformed(data.substr(0, bytes),
                             {place, "truncated payload", "expected 6 bytes",
                              "2x3 elements of 1 bytes", "after " + std::to_string(bytes - 12)});
        }
    }
    expect_malformed(data.substr(0, 2), {"expected at least 8 bytes"});
    expect_malformed(data.substr(0, 9), {"expected 12 bytes for 2 dimensions"});
}

TEST_CASE("IDX: trailing bytes", "[data][idx]") {
    expect_malformed(good_data() + "xyz",
                     {"byte offset 18 of the IDX data", "trailing bytes", "2x3 elements"});
    expect_bad_file(good_data() + "xyz", {"found 3 bytes more"});
    expect_bad_file(gzip(good_data() + "xyz"), {"found at least 1 byte more"});
}

TEST_CASE("IDX: sizes that overflow or exceed the file do not allocate", "[data][idx]") {
    const std::uint32_t huge = std::numeric_limits<std::uint32_t>::max();
    expect_malformed(header(0x0E, {huge, huge, huge}) + "x",
                     {"byte offset 4 of the IDX data", "4294967295x4294967295x4294967295",
                      "elements of 8 bytes", "fits 63 bits"});
    // Fits 63 bits, but not the file.
    expect_malformed(header(0x08, {huge, 0x7FFFFFFF}) + "x",
                     {"byte offset 13 of the IDX data", "truncated payload"});
    expect_malformed(header(0x0E, {huge}) + "x",
                     {"byte offset 9 of the IDX data", "expected 34359738360 bytes"});
}

TEST_CASE("IDX: damaged gzip", "[data][idx]") {
    const std::string good = gzip(good_data());
    const std::size_t end = good.size();

    std::string bad = good;
    bad[end - 8] = static_cast<char>(bad[end - 8] ^ 1);
    expect_bad_file(bad, {"of the gzip file", "expected intact gzip data", "incorrect data check"});

    bad = good;
    bad[end - 4] = static_cast<char>(bad[end - 4] ^ 1);
    expect_bad_file(bad, {"of the gzip file", "incorrect length check", "download"});

    bad = good;
    bad[2] = 7;  // compression method
    expect_bad_file(bad, {"of the gzip file", "unknown compression method"});

    // The file may be truncated anywhere after the two bytes that identify gzip.
    for (std::size_t bytes = 2; bytes < end; ++bytes) {
        expect_bad_file(good.substr(0, bytes),
                        {"byte offset " + std::to_string(bytes) + " of the gzip file",
                         "the file ends before the gzip data does"});
    }
    // No flipped bit may go unnoticed, except in header fields that do not affect the data.
    for (std::size_t i = 10; i < end; ++i) {
        bad = good;
        bad[i] = static_cast<char>(bad[i] ^ 0x10);
        INFO("flipped a bit at " << i);
        expect_bad_file(bad, {"byte offset "});
    }
}

TEST_CASE("IDX: bytes after a gzip member", "[data][idx]") {
    const std::string good = gzip(good_data());
    const std::string place = "byte offset " + std::to_string(good.size()) + " of the gzip file";
    expect_bad_file(good + "garbage", {place, "found other bytes after the gzip data"});
    expect_bad_file(good + "g", {place, "found other bytes after the gzip data"});
    expect_bad_file(good + std::string(512, '\0'), {place, "other bytes after"});
    expect_bad_file(good + good, {"byte offset 18 of the IDX data", "trailing bytes"});
    expect_bad_file(good + gzip("").substr(0, 12), {"the file ends before the gzip data does"});
}

TEST_CASE("IDX: damaged xz", "[data][idx]") {
    const std::string good = xz(good_data());
    for (std::size_t bytes = 6; bytes < good.size(); ++bytes) {
        expect_bad_file(good.substr(0, bytes),
                        {"byte offset " + std::to_string(bytes) + " of the xz file",
                         "the file ends before the xz data does"});
    }
    for (std::size_t i = 6; i < good.size(); ++i) {
        std::string bad = good;
        bad[i] = static_cast<char>(bad[i] ^ 0x10);
        INFO("flipped a bit at " << i);
        // Damage in the IDX header is reported before a check of xz can fail.
        expect_bad_file(bad, {"byte offset "});
    }
    std::string bad = good;
    bad[36] = static_cast<char>(bad[36] ^ 1);  // in the last elements
    expect_bad_file(bad, {"of the xz file", "a check failed"});
    for (const std::size_t garbage_bytes : {1U, 4U, 7U, 100U}) {
        expect_bad_file(good + std::string(garbage_bytes, 'g'),
                        {"of the xz file", "other bytes follow the xz data"});
    }
    expect_bad_file(good + good, {"byte offset 18 of the IDX data", "trailing bytes"});
}

TEST_CASE("IDX: an xz file that needs too much memory", "[data][idx]") {
    lzma_options_lzma options{};
    REQUIRE(!lzma_lzma_preset(&options, 0));
    options.dict_size = 1U << 30U;
    std::array<lzma_filter, 2> filters{lzma_filter{LZMA_FILTER_LZMA2, &options},
                                       lzma_filter{LZMA_VLI_UNKNOWN, nullptr}};
    // This takes a good file and claims a larger dictionary in its block header.
    std::string file = xz(good_data());
    lzma_block block{};
    block.version = 1;
    block.check = LZMA_CHECK_CRC64;
    block.filters = filters.data();
    block.compressed_size = LZMA_VLI_UNKNOWN;
    block.uncompressed_size = LZMA_VLI_UNKNOWN;
    REQUIRE(lzma_block_header_size(&block) == LZMA_OK);
    REQUIRE(block.header_size == 12);  // the usual size, so it fits in place
    REQUIRE(lzma_block_header_encode(&block, reinterpret_cast<std::uint8_t*>(file.data()) + 12) ==
            LZMA_OK);
    expect_bad_file(file, {"of the xz file", "more than 512 MiB"});
}

TEST_CASE("IDX: files that cannot be read", "[data][idx]") {
    const TempDir dir;
    expect_error(ExitCode::bad_input, {"missing-file", "no such file"},
                 [&] { read_idx(dir.path() / "missing-file"); });
    expect_error(ExitCode::bad_input, {dir.path().string(), "found a directory"},
                 [&] { read_idx(dir.path()); });
    expect_error(ExitCode::bad_input, {"/dev/null", "found a device"},
                 [&] { read_idx("/dev/null"); });
    write_file(dir.path() / "file", "x");
    expect_error(ExitCode::bad_input, {"file/below", ": "},
                 [&] { read_idx(dir.path() / "file" / "below"); });
    if (geteuid() == 0) {
        WARN("skipped: root can read a file without permissions");
    } else {
        fs::permissions(dir.path() / "file", fs::perms::none);
        expect_error(ExitCode::bad_input, {"file", "cannot open", "permissions"},
                     [&] { read_idx(dir.path() / "file"); });
    }
}
