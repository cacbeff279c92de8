// The watchdog's connections: any port, IPv6 and IPv4, non-blocking messages of a fixed size.
#pragma once

#include <fcntl.h>

#include <cerrno>
#include <cstdint>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "comm/launch/socket.hpp"

namespace gyre::comm {

// A connection that carries messages of a fixed size. It closes itself in receive() when the other
// side is gone.
class Link {
 public:
    Link() = default;
    explicit Link(Socket socket) : socket_(std::move(socket)) {
        const int on = 1;
        setsockopt(socket_.fd(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
        fcntl(socket_.fd(), F_SETFL, fcntl(socket_.fd(), F_GETFL) | O_NONBLOCK);
    }
    bool open() const { return socket_.open(); }
    int fd() const { return socket_.fd(); }
    void close() { socket_.close(); }

    // Sends as much as fits. If the other side is slow, whole messages are dropped, never parts.
    void send(const void* data, std::size_t bytes) {
        if (!open()) {
            return;
        }
        if (unsent_.empty()) {
            const auto* begin = static_cast<const char*>(data);
            unsent_.assign(begin, begin + bytes);
        }
        const ssize_t sent = ::send(fd(), unsent_.data(), unsent_.size(), MSG_NOSIGNAL);
        if (sent > 0) {
            unsent_.erase(unsent_.begin(), unsent_.begin() + sent);
        } else if (sent < 0 && errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR) {
            unsent_.clear();  // receive() closes, after reading what the other side had sent
        }
    }
    // Receives the oldest message of this size; returns false if it has not arrived completely.
    bool receive(void* data, std::size_t bytes) {
        while (open()) {
            char buffer[4096];
            const ssize_t got = ::recv(fd(), buffer, sizeof buffer, 0);
            if (got == 0 ||
                (got < 0 && errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR)) {
                close();
            }
            if (got <= 0) {
                break;
            }
            received_.insert(received_.end(), buffer, buffer + got);
        }
        if (received_.size() < bytes) {
            return false;
        }
        std::memcpy(data, received_.data(), bytes);
        received_.erase(received_.begin(), received_.begin() + static_cast<std::ptrdiff_t>(bytes));
        return true;
    }

 private:
    Socket socket_;
    std::vector<char> unsent_, received_;
};

// Listens on any port, for IPv6 and IPv4, or only for this host if the whole job is on it. On
// failure the returned socket is not open.
Socket listen_anywhere(bool this_host_only, std::uint16_t& port);
// Returns this host's addresses that others may reach, separated by spaces, IPv4 first.
std::string own_addresses(bool this_host_only);
// host: a numeric address. On failure the returned socket is not open.
Socket connect_to(const std::string& host, std::uint16_t port, int timeout_ms);

}  // namespace gyre::comm
