#include "comm/launch/tcp_address.hpp"

#include <arpa/inet.h>
#include <fmt/format.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <cstdlib>
#include <string_view>

#include "base/host_name.hpp"
#include "comm/launch/meeting_error.hpp"

namespace gyre::comm {
namespace {

std::string in_words(const std::vector<OwnAddress>& addresses) {
    std::string text;
    for (const auto& [interface, address, loopback] : addresses) {
        text += fmt::format("{}{} ({})", text.empty() ? "" : ", ", interface, address);
    }
    return text;
}

// Returns whether an IPv4 address is in a network such as 10.1.0.0/16.
bool in_network(const std::string& address, std::string_view network) {
    const std::size_t slash = network.find('/');
    in_addr own{}, base{};
    unsigned bits = 0;
    if (slash == std::string_view::npos || inet_pton(AF_INET, address.c_str(), &own) != 1 ||
        inet_pton(AF_INET, std::string(network.substr(0, slash)).c_str(), &base) != 1 ||
        std::from_chars(network.data() + slash + 1, network.data() + network.size(), bits).ec !=
            std::errc() ||
        bits > 32) {
        return false;
    }
    const std::uint64_t mask = ~std::uint64_t{0} << (32 - bits);
    return ((ntohl(own.s_addr) ^ ntohl(base.s_addr)) & mask) == 0;
}

// This host's address in the first that it is in of a list of interfaces and of networks such as
// 10.1.0.0/16, which Open MPI takes; empty if it is in none.
std::string address_in(std::string_view networks, const std::vector<OwnAddress>& addresses) {
    while (!networks.empty()) {
        const std::string_view network = networks.substr(0, networks.find(','));
        networks.remove_prefix(std::min(network.size() + 1, networks.size()));
        for (const OwnAddress& own : addresses) {
            if (own.interface == network || in_network(own.address, network)) {
                return own.address;
            }
        }
    }
    return {};
}

}  // namespace

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

std::vector<OwnAddress> own_addresses() {
    ifaddrs* all = nullptr;
    if (getifaddrs(&all) != 0) {
        throw meeting_error(fmt::format("{}: the network interfaces cannot be listed: {}",
                                        host_name(), error_text(errno)));
    }
    const std::unique_ptr<ifaddrs, decltype(&freeifaddrs)> owner(all, &freeifaddrs);
    std::vector<OwnAddress> found;
    for (const int family : {AF_INET, AF_INET6}) {
        for (const ifaddrs* at = all; at != nullptr; at = at->ifa_next) {
            if (at->ifa_addr == nullptr || at->ifa_addr->sa_family != family ||
                (at->ifa_flags & IFF_UP) == 0) {
                continue;
            }
            const socklen_t length = family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6);
            std::string address = numeric(at->ifa_addr, length).address;
            if (address.find('%') == std::string::npos) {  // link-local
                found.push_back(
                    {at->ifa_name, std::move(address), (at->ifa_flags & IFF_LOOPBACK) != 0});
            }
        }
    }
    return found;
}

std::string address_of_interface(const std::string& interfaces, const std::string& variable) {
    const std::vector<OwnAddress> addresses = own_addresses();
    std::string address = address_in(interfaces, addresses);
    if (address.empty()) {
        throw meeting_error(fmt::format(
            "{}={}: {} has no network interface of this name that is up and has an address; it "
            "has: {}",
            variable, interfaces, host_name(), in_words(addresses)));
    }
    return address;
}

std::string listening_address() {
    if (const char* const interface = std::getenv(kInterfaceVariable)) {
        return address_of_interface(interface, kInterfaceVariable);
    }
    const std::vector<OwnAddress> addresses = own_addresses();
    if (const char* const networks = std::getenv("OMPI_MCA_btl_tcp_if_include")) {
        if (std::string address = address_in(networks, addresses); !address.empty()) {
            return address;
        }
    }
    const auto outside = std::find_if(addresses.begin(), addresses.end(),
                                      [](const OwnAddress& a) { return !a.loopback; });
    return outside == addresses.end() ? std::string() : outside->address;
}

}  // namespace gyre::comm
