// Connections of the watchdog: any port, IPv6 and IPv4, messages of a fixed size that nobody waits
// for.
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

// A connection that carries messages of a fixed size. Closes itself, as it receives, when the other
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

    // Sends what fits: a message is dropped, never half sent twice, when the other side is slow.
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
            unsent_.clear();  // receive() closes, after what the other side sent before it ended
        }
    }
    // The oldest message that has arrived, of this size, if it is whole.
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

// Listens on any port, for IPv6 and IPv4 alike; of this host alone where the whole job is there.
// Not open where that failed.
Socket listen_anywhere(bool this_host_only, std::uint16_t& port);
// This host's addresses that others may reach, blank-separated, IPv4 first.
std::string own_addresses(bool this_host_only);
// host: an address in numbers. Not open where it cannot be reached.
Socket connect_to(const std::string& host, std::uint16_t port, int timeout_ms);

}  // namespace gyre::comm
