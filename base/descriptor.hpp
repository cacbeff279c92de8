// A file descriptor that closes itself.
#pragma once

#include <unistd.h>

#include <utility>

namespace gyre {

class Descriptor {
 public:
    Descriptor() = default;
    // fd: < 0: none, as open() and socket() return on failure.
    explicit Descriptor(int fd) : fd_(fd) {}
    ~Descriptor() { close(); }
    Descriptor(Descriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
    Descriptor& operator=(Descriptor&& other) noexcept {
        std::swap(fd_, other.fd_);
        return *this;
    }

    int fd() const { return fd_; }
    int release() { return std::exchange(fd_, -1); }
    bool open() const { return fd_ >= 0; }
    void close() {
        if (fd_ >= 0) {
            ::close(std::exchange(fd_, -1));
        }
    }

 private:
    int fd_ = -1;
};

}  // namespace gyre
