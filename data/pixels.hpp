// The bytes of images, in memory or mapped from a file.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <utility>
#include <vector>

namespace gyre::data {

// Like a vector of bytes. Mapped ones take memory only while they are looked at, the same for all
// processes; copies share them, and the first write through a copy gives it its own memory.
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
    // New bytes are 0; fewer of mapped ones stay mapped.
    void resize(std::size_t bytes);
    // Some of them: mapped ones stay so, others are copied.
    Pixels part(std::size_t first, std::size_t bytes) const;
    bool mapped() const { return shared_ != nullptr; }

 private:
    std::vector<std::uint8_t> own_;
    std::shared_ptr<const std::uint8_t> shared_;  // null: own_
    std::size_t bytes_ = 0;
};

// Bytes [offset, offset + bytes) of a file that is at least as long, mapped for reading. Throws
// input_error.
Pixels map_pixels(const std::filesystem::path& path, std::size_t offset, std::size_t bytes);

// A file's memory as a shared pointer to what begins at `offset`; null where it cannot be mapped,
// errno says why.
std::shared_ptr<std::uint8_t> map_file(int file, std::size_t offset, std::size_t bytes,
                                       bool writable);

}  // namespace gyre::data
