#include "data/decompress.hpp"

#include <fmt/format.h>
#include <lzma.h>
#include <zlib.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <new>
#include <string_view>
#include <system_error>
#include <utility>

#include "base/error.hpp"

namespace gyre::data {
namespace {

namespace fs = std::filesystem;

constexpr std::size_t input_buffer_bytes = std::size_t{64} << 10U;
// xz -9 needs 65 MiB; the limit only stops a crafted file from claiming gigabytes.
constexpr std::uint64_t xz_memory_limit_bytes = std::uint64_t{512} << 20U;

// A regular file opened for reading, with the number of bytes read so far.
class InputFile {
 public:
    explicit InputFile(const fs::path& path) : name_(path.string()) {
        std::error_code error;
        const fs::file_status status = fs::status(path, error);
        if (status.type() == fs::file_type::not_found) {
            throw input_error(fmt::format("{}: no such file", name_));
        }
        if (error) {
            throw input_error(fmt::format("{}: cannot read: {}", name_, error.message()));
        }
        if (fs::is_directory(status)) {
            throw input_error(fmt::format("{}: expected an IDX file, found a directory", name_));
        }
        if (!fs::is_regular_file(status)) {
            throw input_error(
                fmt::format("{}: expected an IDX file, found a device, pipe or socket", name_));
        }
        handle_.reset(std::fopen(path.c_str(), "rb"));
        if (!handle_) {
            throw input_error(fmt::format("{}: cannot open for reading: {}; check its permissions",
                                          name_, errno_text(errno)));
        }
        file_bytes_ = static_cast<std::int64_t>(fs::file_size(path, error));
        if (error) {
            throw input_error(fmt::format("{}: cannot get its size: {}", name_, error.message()));
        }
    }

    const std::string& name() const { return name_; }
    std::int64_t file_bytes() const { return file_bytes_; }
    std::int64_t offset() const { return offset_; }

    // Reads up to `bytes`; fewer only at the end of the file.
    std::size_t read(void* out, std::size_t bytes) {
        const std::size_t got_bytes = std::fread(out, 1, bytes, handle_.get());
        if (got_bytes < bytes && std::ferror(handle_.get()) != 0) {
            throw input_error(fmt::format("{}: byte offset {}: cannot read: {}", name_,
                                          offset_ + static_cast<std::int64_t>(got_bytes),
                                          errno_text(errno)));
        }
        offset_ += static_cast<std::int64_t>(got_bytes);
        return got_bytes;
    }

    void rewind() {
        std::rewind(handle_.get());
        offset_ = 0;
    }

 private:
    std::string name_;
    FileHandle handle_;
    std::int64_t file_bytes_ = 0;
    std::int64_t offset_ = 0;
};

class FileSource : public Source {
 public:
    explicit FileSource(InputFile file) : file_(std::move(file)) {}
    const std::string& name() const override { return file_.name(); }

 protected:
    InputFile file_;
};

class PlainSource : public FileSource {
 public:
    using FileSource::FileSource;
    std::size_t read(std::byte* out, std::size_t bytes) override { return file_.read(out, bytes); }
    std::optional<std::int64_t> known_bytes() const override { return file_.file_bytes(); }
};

class GzipSource : public FileSource {
 public:
    explicit GzipSource(InputFile file) : FileSource(std::move(file)) {
        // 15: the largest window; +16: gzip wrapper, whose CRC and length zlib then checks.
        if (inflateInit2(&stream_, 15 + 16) != Z_OK) {
            throw std::bad_alloc();
        }
    }
    ~GzipSource() override { inflateEnd(&stream_); }
    GzipSource(const GzipSource&) = delete;
    GzipSource& operator=(const GzipSource&) = delete;

    std::size_t read(std::byte* out, std::size_t bytes) override {
        std::size_t done_bytes = 0;
        while (done_bytes < bytes) {
            if (stream_.avail_in == 0) {
                stream_.next_in = buffer_.data();
                stream_.avail_in = static_cast<uInt>(file_.read(buffer_.data(), buffer_.size()));
            }
            if (member_ended_) {
                if (stream_.avail_in == 0) {
                    break;
                }
                inflateReset(&stream_);
                member_ended_ = false;
                first_member_ = false;
                member_offset_ = offset();
            } else if (stream_.avail_in == 0) {
                fail("the file ends before the gzip data does");
            }
            const auto room_bytes =
                static_cast<uInt>(std::min(bytes - done_bytes, std::size_t{1} << 30U));
            stream_.next_out = reinterpret_cast<Bytef*>(out + done_bytes);
            stream_.avail_out = room_bytes;
            const int status = inflate(&stream_, Z_NO_FLUSH);
            done_bytes += room_bytes - stream_.avail_out;
            if (status == Z_STREAM_END) {
                member_ended_ = true;
            } else if (status == Z_MEM_ERROR) {
                throw std::bad_alloc();
            } else if (status != Z_OK) {
                fail(stream_.msg != nullptr ? stream_.msg : "bad data");
            }
        }
        return done_bytes;
    }

 private:
    std::int64_t offset() const {
        return file_.offset() - static_cast<std::int64_t>(stream_.avail_in);
    }

    [[noreturn]] void fail(std::string_view what) const {
        // zlib consumes the two magic bytes of a member before it rejects them.
        if (!first_member_ && stream_.total_in <= 2) {
            throw input_error(
                fmt::format("{}: byte offset {} of the gzip file: expected the end of the file or "
                            "another gzip member (1f 8b), found other bytes after the gzip data; "
                            "download the file again or remove them",
                            name(), member_offset_));
        }
        throw input_error(
            fmt::format("{}: byte offset {} of the gzip file: expected intact gzip data, found "
                        "damage: {}; download or copy the file again",
                        name(), offset(), what));
    }

    z_stream stream_{};
    std::array<Bytef, input_buffer_bytes> buffer_{};
    bool first_member_ = true;
    bool member_ended_ = false;
    std::int64_t member_offset_ = 0;
};

class XzSource : public FileSource {
 public:
    explicit XzSource(InputFile file) : FileSource(std::move(file)) {
        if (lzma_stream_decoder(&stream_, xz_memory_limit_bytes,
                                LZMA_CONCATENATED | LZMA_TELL_UNSUPPORTED_CHECK) != LZMA_OK) {
            throw std::bad_alloc();
        }
    }
    ~XzSource() override { lzma_end(&stream_); }
    XzSource(const XzSource&) = delete;
    XzSource& operator=(const XzSource&) = delete;

    std::size_t read(std::byte* out, std::size_t bytes) override {
        stream_.next_out = reinterpret_cast<std::uint8_t*>(out);
        stream_.avail_out = bytes;
        while (stream_.avail_out > 0 && !ended_) {
            if (stream_.avail_in == 0 && !file_ended_) {
                stream_.next_in = buffer_.data();
                stream_.avail_in = file_.read(buffer_.data(), buffer_.size());
                file_ended_ = stream_.avail_in == 0;
            }
            const lzma_ret status = lzma_code(&stream_, file_ended_ ? LZMA_FINISH : LZMA_RUN);
            if (status == LZMA_STREAM_END) {
                ended_ = true;
            } else if (status != LZMA_OK) {
                fail(status);
            }
        }
        return bytes - stream_.avail_out;
    }

 private:
    [[noreturn]] void fail(lzma_ret status) const {
        std::string what;
        switch (status) {
            case LZMA_MEM_ERROR:
                throw std::bad_alloc();
            case LZMA_BUF_ERROR:
                what =
                    "damage: the file ends before the xz data does, or other bytes follow the xz "
                    "data";
                break;
            case LZMA_DATA_ERROR:
                what = "damage: a check failed, or other bytes follow the xz data";
                break;
            case LZMA_MEMLIMIT_ERROR:
                what = fmt::format("xz data that needs more than {} MiB to decompress",
                                   xz_memory_limit_bytes >> 20U);
                break;
            default:
                what = fmt::format("damage or an unsupported option (liblzma status {})",
                                   static_cast<int>(status));
        }
        throw input_error(fmt::format(
            "{}: byte offset {} of the xz file: expected intact xz data, found {}; "
            "download or copy the file again, or compress it again with plain xz",
            name(), file_.offset() - static_cast<std::int64_t>(stream_.avail_in), what));
    }

    lzma_stream stream_ = LZMA_STREAM_INIT;
    std::array<std::uint8_t, input_buffer_bytes> buffer_{};
    bool file_ended_ = false;
    bool ended_ = false;
};

}  // namespace

std::string errno_text(int error) {
    return std::generic_category().message(error);
}

std::unique_ptr<Source> open_source(const fs::path& path) {
    InputFile file(path);
    std::array<char, 6> magic{};
    const std::string_view start(magic.data(), file.read(magic.data(), magic.size()));
    file.rewind();
    if (start.starts_with("\x1f\x8b")) {
        return std::make_unique<GzipSource>(std::move(file));
    }
    if (start == std::string_view("\xfd\x37zXZ\0", 6)) {
        return std::make_unique<XzSource>(std::move(file));
    }
    return std::make_unique<PlainSource>(std::move(file));
}

}  // namespace gyre::data
