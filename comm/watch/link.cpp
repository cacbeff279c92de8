#include "comm/watch/link.hpp"

#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <poll.h>

#include <memory>

namespace gyre::comm {

Socket listen_anywhere(bool this_host_only, std::uint16_t& port) {
    for (const int family : {AF_INET6, AF_INET}) {  // a system may lack IPv6
        if (family == AF_INET6 && this_host_only) {
            continue;
        }
        Socket socket(::socket(family, SOCK_STREAM | SOCK_CLOEXEC, 0));
        sockaddr_storage address{};
        socklen_t length = sizeof(sockaddr_in6);
        auto* const plain = reinterpret_cast<sockaddr*>(&address);
        plain->sa_family = static_cast<sa_family_t>(family);
        if (family == AF_INET6) {
            const int off = 0;
            setsockopt(socket.fd(), IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof off);
        } else {
            length = sizeof(sockaddr_in);
            reinterpret_cast<sockaddr_in*>(plain)->sin_addr.s_addr =
                htonl(this_host_only ? INADDR_LOOPBACK : INADDR_ANY);
        }
        if (socket.open() && bind(socket.fd(), plain, length) == 0 &&
            listen(socket.fd(), SOMAXCONN) == 0 && getsockname(socket.fd(), plain, &length) == 0) {
            // Both kinds of address have their port at the same offset.
            port = ntohs(reinterpret_cast<const sockaddr_in*>(plain)->sin_port);
            return socket;
        }
    }
    return {};
}

std::string own_addresses(bool this_host_only) {
    if (this_host_only) {
        return "127.0.0.1";
    }
    std::string text;
    ifaddrs* all = nullptr;
    if (getifaddrs(&all) != 0) {
        return text;
    }
    for (const int family : {AF_INET, AF_INET6}) {
        for (const ifaddrs* at = all; at != nullptr; at = at->ifa_next) {
            char name[NI_MAXHOST] = {};
            const socklen_t length = family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6);
            if (at->ifa_addr == nullptr || at->ifa_addr->sa_family != family ||
                (at->ifa_flags & IFF_LOOPBACK) != 0 ||
                getnameinfo(at->ifa_addr, length, name, sizeof name, nullptr, 0, NI_NUMERICHOST) !=
                    0 ||
                std::strchr(name, '%') != nullptr) {  // link-local: useless to other hosts
                continue;
            }
            text.append(text.empty() ? "" : " ").append(name);
        }
    }
    freeifaddrs(all);
    return text;
}

Socket connect_to(const std::string& host, std::uint16_t port, int timeout_ms) {
    addrinfo hints{};
    hints.ai_socktype = SOCK_STREAM;
    hints.ai_flags = AI_NUMERICHOST | AI_NUMERICSERV;
    addrinfo* address = nullptr;
    if (getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &address) != 0) {
        return {};
    }
    const std::unique_ptr<addrinfo, decltype(&freeaddrinfo)> owner(address, &freeaddrinfo);
    Socket socket(::socket(address->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    if (!socket.open()) {
        return {};
    }
    if (connect(socket.fd(), address->ai_addr, address->ai_addrlen) != 0) {
        pollfd wait{socket.fd(), POLLOUT, 0};
        int error = 0;
        socklen_t length = sizeof error;
        if (errno != EINPROGRESS || poll(&wait, 1, timeout_ms) != 1 ||
            getsockopt(socket.fd(), SOL_SOCKET, SO_ERROR, &error, &length) != 0 || error != 0) {
            return {};
        }
    }
    return socket;
}

}  // namespace gyre::comm
