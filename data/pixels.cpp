#include "data/pixels.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "base/error.hpp"
#include "data/decompress.hpp"

namespace gyre::data {

std::uint8_t* Pixels::writable() {
    if (shared_) {
        own_.assign(begin(), end());
        shared_.reset();
    }
    return own_.data();
}

void Pixels::resize(std::size_t bytes) {
    if (!shared_ || bytes > bytes_) {
        writable();
        own_.resize(bytes);
        own_.shrink_to_fit();
    }
    bytes_ = bytes;
}

Pixels Pixels::part(std::size_t first, std::size_t bytes) const {
    if (shared_) {
        return {std::shared_ptr<const std::uint8_t>(shared_, shared_.get() + first), bytes};
    }
    return std::vector<std::uint8_t>(data() + first, data() + first + bytes);
}

std::shared_ptr<std::uint8_t> map_file(int file, std::size_t offset, std::size_t bytes,
                                       bool writable) {
    const std::size_t all = offset + bytes;
    void* memory =
        mmap(nullptr, all, writable ? PROT_READ | PROT_WRITE : PROT_READ, MAP_SHARED, file, 0);
    if (memory == MAP_FAILED) {
        return nullptr;
    }
    const std::shared_ptr<void> mapping(memory, [all](void* at) { munmap(at, all); });
    return {mapping, static_cast<std::uint8_t*>(memory) + offset};
}

Pixels map_pixels(const std::filesystem::path& path, std::size_t offset, std::size_t bytes) {
    const int file = open(path.c_str(), O_RDONLY | O_CLOEXEC);
    std::shared_ptr<std::uint8_t> memory;
    if (file >= 0) {
        memory = map_file(file, offset, bytes, false);
    }
    const int error = errno;
    if (file >= 0) {
        close(file);
    }
    if (!memory) {
        throw input_error(
            fmt::format("{}: cannot map it into memory: {}", path.string(), errno_text(error)));
    }
    return {std::move(memory), bytes};
}

}  // namespace gyre::data
