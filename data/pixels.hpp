// The bytes of images, in memory or mapped from a file.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <utility>
#include <vector>

namespace gyre::data {

// Like a vector of bytes. Mapped bytes take memory only while they are used, and processes share
// it; copies share them too, until the first write through a copy gives it its own memory.
class Pixels {
 public:
    Pixels() = default;
    Pixels(std::vector<std::uint8_t> bytes) : own_(std::move(bytes)), bytes_(own_.size()) {}
    Pixels(std::shared_ptr<const std::uint8_t> shared, std::size_t bytes)
        : shared_(std::move(shared)), bytes_(bytes) {}

    const std::uint8_t* data() const { return shared_ ? shared_.get() : own_.data(); }
    std::size_t size() const { return bytes_; }
    const std::uint8_t* begin() const { return data(); }
    const std::uint8_t* end() const { return data() + bytes_; }
    const std::uint8_t& operator[](std::size_t i) const { return data()[i]; }
    std::uint8_t& operator[](std::size_t i) { return writable()[i]; }
    std::uint8_t at(std::size_t i) const { return i < bytes_ ? data()[i] : own_.at(i); }

    std::uint8_t* writable();
    // New bytes are 0; mapped bytes stay mapped when the size shrinks.
    void resize(std::size_t bytes);
    // Returns some of the bytes: mapped ones stay mapped, others are copied.
    Pixels part(std::size_t first, std::size_t bytes) const;
    bool mapped() const { return shared_ != nullptr; }

 private:
    std::vector<std::uint8_t> own_;
    std::shared_ptr<const std::uint8_t> shared_;  // null: own_
    std::size_t bytes_ = 0;
};

// Maps bytes [offset, offset + bytes) of a file, which must be at least that long, for reading.
// Throws input_error.
Pixels map_pixels(const std::filesystem::path& path, std::size_t offset, std::size_t bytes);

// Maps a file and returns a shared pointer to the byte at `offset`; null if it cannot be mapped,
// with the reason in errno. If the file is truncated later, reading what it has lost ends the
// process with ExitCode::bad_input and a message that names `path`.
std::shared_ptr<std::uint8_t> map_file(int file, const std::filesystem::path& path,
                                       std::size_t offset, std::size_t bytes, bool writable);

}  // namespace gyre::data
