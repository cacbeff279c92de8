// A socket that closes itself, with calls that send and receive all of something.
#pragma once

#include <arpa/inet.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "base/descriptor.hpp"

namespace gyre::comm {

// 32 bits of length, big endian, and the bytes.
inline std::string frame(std::string_view bytes) {
    const std::uint32_t length = htonl(static_cast<std::uint32_t>(bytes.size()));
    std::string text(reinterpret_cast<const char*>(&length), sizeof length);
    return text.append(bytes);
}

class Socket : public Descriptor {
 public:
    using Descriptor::Descriptor;

    // Both return false if the other side is gone or takes longer than the socket's timeout;
    // errno says why, and is 0 if the other side closed in an orderly way.
    bool send_all(std::string_view bytes) const {
        while (!bytes.empty()) {
            const ssize_t sent = ::send(fd(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
            if (sent < 0 && errno != EINTR) {
                return false;
            }
            bytes.remove_prefix(sent > 0 ? static_cast<std::size_t>(sent) : 0);
        }
        return true;
    }
    bool receive_all(char* data, std::size_t bytes) const {
        while (bytes > 0) {
            const ssize_t received = ::recv(fd(), data, bytes, 0);
            if (received == 0) {
                errno = 0;
                return false;
            }
            if (received < 0 && errno != EINTR) {
                return false;
            }
            data += std::max<ssize_t>(received, 0);
            bytes -= static_cast<std::size_t>(std::max<ssize_t>(received, 0));
        }
        return true;
    }
    // Receives what frame() made, without its length; fails with EMSGSIZE if it claims over `most`.
    std::optional<std::string> receive_frame(std::size_t most) const {
        std::uint32_t length = 0;
        if (!receive_all(reinterpret_cast<char*>(&length), sizeof length)) {
            return std::nullopt;
        }
        length = ntohl(length);
        if (length > most) {
            errno = EMSGSIZE;
            return std::nullopt;
        }
        std::string bytes(length, '\0');
        if (!receive_all(bytes.data(), bytes.size())) {
            return std::nullopt;
        }
        return bytes;
    }

    void set_timeouts(std::chrono::milliseconds time) const {
        const timeval value{time.count() / 1000, time.count() % 1000 * 1000};
        setsockopt(fd(), SOL_SOCKET, SO_RCVTIMEO, &value, sizeof value);
        setsockopt(fd(), SOL_SOCKET, SO_SNDTIMEO, &value, sizeof value);
        const int yes = 1;
        setsockopt(fd(), IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes);
    }
};

}  // namespace gyre::comm
