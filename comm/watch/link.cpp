#include "comm/watch/link.hpp"

#include <netinet/in.h>
#include <poll.h>

#include <algorithm>
#include <memory>

#include "base/clock.hpp"
#include "comm/launch/tcp_address.hpp"

namespace gyre::comm {

namespace {

std::unique_ptr<Addresses> numbers(const std::string& address, std::uint16_t port) {
    addrinfo hints{};
    hints.ai_socktype = SOCK_STREAM;
    hints.ai_flags = AI_NUMERICHOST | AI_NUMERICSERV;
    auto found = std::make_unique<Addresses>();
    return getaddrinfo(address.c_str(), std::to_string(port).c_str(), &hints, &found->first) == 0
               ? std::move(found)
               : nullptr;
}

}  // namespace

Socket listen_at(const std::string& address, std::uint16_t& port) {
    const std::unique_ptr<Addresses> found = numbers(address, 0);
    if (!found) {
        return {};
    }
    Socket socket(::socket(found->first->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0));
    sockaddr_storage bound{};
    auto* const plain = reinterpret_cast<sockaddr*>(&bound);
    socklen_t length = sizeof bound;
    if (!socket.open() || bind(socket.fd(), found->first->ai_addr, found->first->ai_addrlen) != 0 ||
        listen(socket.fd(), SOMAXCONN) != 0 || getsockname(socket.fd(), plain, &length) != 0) {
        return {};
    }
    // Both kinds of address have their port at the same offset.
    port = ntohs(reinterpret_cast<const sockaddr_in*>(plain)->sin_port);
    return socket;
}

Socket connect_to(const std::string& address, std::uint16_t port, int timeout_ms) {
    const std::unique_ptr<Addresses> found = numbers(address, port);
    if (!found) {
        return {};
    }
    Socket socket(::socket(found->first->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    if (!socket.open()) {
        return {};
    }
    if (connect(socket.fd(), found->first->ai_addr, found->first->ai_addrlen) != 0) {
        pollfd wait{socket.fd(), POLLOUT, 0};
        int error = 0, ready = 0;
        socklen_t length = sizeof error;
        const bool begun = errno == EINPROGRESS;
        const auto start = Clock::now();
        int left_ms = timeout_ms;
        do {  // again if a signal interrupts it
            ready = begun ? poll(&wait, 1, left_ms) : 0;
            left_ms = std::max(0, timeout_ms - static_cast<int>(1e3 * seconds_since(start)));
        } while (ready < 0 && errno == EINTR);
        if (ready != 1 || getsockopt(socket.fd(), SOL_SOCKET, SO_ERROR, &error, &length) != 0 ||
            error != 0) {
            return {};
        }
    }
    return socket;
}

}  // namespace gyre::comm
