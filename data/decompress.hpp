// Reads the bytes of a file, decompressed if it is gzip or xz.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>

namespace gyre::data {

struct CloseFile {
    void operator()(std::FILE* file) const { std::fclose(file); }
};
using FileHandle = std::unique_ptr<std::FILE, CloseFile>;

// Describes a value of errno.
std::string errno_text(int error);

// The decompressed bytes of a file.
class Source {
 public:
    Source() = default;
    virtual ~Source() = default;
    Source(const Source&) = delete;
    Source& operator=(const Source&) = delete;

    // Reads up to `bytes`; fewer only at the end of the data. Throws input_error on damage.
    virtual std::size_t read(std::byte* out, std::size_t bytes) = 0;
    // The size of the data, if it is known before reading.
    virtual std::optional<std::int64_t> known_bytes() const { return std::nullopt; }
    virtual const std::string& name() const = 0;  // the file's path
};

// Opens a plain, gzip or xz file; its first bytes decide, not its name. Throws input_error if it
// cannot be read.
std::unique_ptr<Source> open_source(const std::filesystem::path& path);

}  // namespace gyre::data
