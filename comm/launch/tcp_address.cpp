#include "comm/launch/tcp_address.hpp"

#include <fmt/format.h>
#include <netinet/in.h>

#include <array>
#include <cerrno>

#include "base/host_name.hpp"
#include "comm/launch/meeting_error.hpp"

namespace gyre::comm {

std::unique_ptr<Addresses> resolve(const std::string& host, int port) {
    addrinfo hints{};
    hints.ai_family = AF_UNSPEC;
    hints.ai_socktype = SOCK_STREAM;
    hints.ai_flags = AI_NUMERICSERV;
    auto addresses = std::make_unique<Addresses>();
    const int result =
        getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &addresses->first);
    if (result != 0) {
        throw meeting_error(fmt::format(
            "the host '{}' of rank 0 was not found by {}: {}; check "
            "the name, or give the address",
            host, host_name(),
            result == EAI_SYSTEM ? error_text(errno) : std::string(gai_strerror(result))));
    }
    return addresses;
}

std::string Numeric::text() const {
    return address.find(':') == std::string::npos ? fmt::format("{}:{}", address, port)
                                                  : fmt::format("[{}]:{}", address, port);
}

Numeric numeric(const sockaddr* address, socklen_t length) {
    std::array<char, NI_MAXHOST> host{};
    std::array<char, NI_MAXSERV> port{};
    if (getnameinfo(address, length, host.data(), host.size(), port.data(), port.size(),
                    NI_NUMERICHOST | NI_NUMERICSERV) != 0) {
        return {"an unknown address", "0"};
    }
    return {host.data(), port.data()};
}

bool is_loopback(const sockaddr* address) {
    if (address->sa_family == AF_INET) {
        const auto* const four = reinterpret_cast<const sockaddr_in*>(address);
        return ntohl(four->sin_addr.s_addr) >> 24 == 127;
    }
    return address->sa_family == AF_INET6 &&
           IN6_IS_ADDR_LOOPBACK(&reinterpret_cast<const sockaddr_in6*>(address)->sin6_addr);
}

}  // namespace gyre::comm
