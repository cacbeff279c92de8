// The watchdog's connections: non-blocking messages of a fixed size.
#pragma once

#include <fcntl.h>

#include <cerrno>
#include <cstdint>
#include <cstring>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "comm/launch/secret.hpp"
#include "comm/launch/socket.hpp"

namespace gyre::comm {

// A connection that carries sealed messages of a fixed size. It closes itself in receive() when the
// other side is gone.
class Link {
 public:
    Link() = default;
    Link(Socket socket, const Seal& seal) : socket_(std::move(socket)), seal_(seal) {
        const int on = 1;
        setsockopt(socket_.fd(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
        fcntl(socket_.fd(), F_SETFL, fcntl(socket_.fd(), F_GETFL) | O_NONBLOCK);
    }
    bool open() const { return socket_.open(); }
    int fd() const { return socket_.fd(); }
    void close() { socket_.close(); }

    // Seals the messages from now on.
    void set_seal(const Seal& seal) { seal_ = seal; }
    // Messages that were dropped, as the other side had not made them, or not now.
    int foreign() const { return foreign_; }

    // Sends as much as fits. If the other side is slow, whole messages are dropped, never parts.
    void send(const void* data, std::size_t bytes) {
        if (!open()) {
            return;
        }
        if (unsent_.empty()) {
            unsent_ = seal_->close({static_cast<const char*>(data), bytes});
        }
        const ssize_t sent = ::send(fd(), unsent_.data(), unsent_.size(), MSG_NOSIGNAL);
        if (sent > 0) {
            unsent_.erase(0, static_cast<std::size_t>(sent));
        } else if (sent < 0 && errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR) {
            unsent_.clear();  // receive() closes, after reading what the other side had sent
        }
    }
    // Receives the oldest message of this size; returns false if none has arrived completely. It
    // reads no more than it needs, and drops at most kMostDropped messages at a time, so that the
    // other side can neither fill the memory nor keep the caller here.
    bool receive(void* data, std::size_t bytes) {
        const std::size_t sealed_bytes = bytes + Seal::kBytes;
        for (int dropped = 0; dropped < kMostDropped; ++dropped) {
            read_until(sealed_bytes);
            if (received_.size() < sealed_bytes) {
                break;
            }
            const auto message = seal_->open(std::string_view(received_).substr(0, sealed_bytes));
            received_.erase(0, sealed_bytes);
            if (message) {
                std::memcpy(data, message->data(), bytes);
                return true;
            }
            ++foreign_;
        }
        return false;
    }

 private:
    static constexpr int kMostDropped = 64;

    void read_until(std::size_t bytes) {
        while (open() && received_.size() < bytes) {
            char buffer[4096];
            const ssize_t got = ::recv(fd(), buffer, sizeof buffer, 0);
            if (got == 0 ||
                (got < 0 && errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR)) {
                close();
            }
            if (got <= 0) {
                break;
            }
            received_.append(buffer, static_cast<std::size_t>(got));
        }
    }

    Socket socket_;
    std::optional<Seal> seal_;  // if there is a socket
    std::string unsent_, received_;
    int foreign_ = 0;
};

// Both take an address as a number. On failure the returned socket is not open.
// Listens at this address of the host's, on any port, which it returns in `port`.
Socket listen_at(const std::string& address, std::uint16_t& port);
Socket connect_to(const std::string& address, std::uint16_t port, int timeout_ms);

}  // namespace gyre::comm
