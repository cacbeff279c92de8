// Addresses of hosts: of others by their names, of this one by its network interfaces.
#pragma once

#include <netdb.h>

#include <memory>
#include <string>
#include <vector>

namespace gyre::comm {

struct Addresses {
    addrinfo* first = nullptr;
    ~Addresses() {
        if (first != nullptr) {
            freeaddrinfo(first);
        }
    }
};

// The addresses of the host of rank 0, in the system's order, which is the same for all ranks of a
// host. Throws Error(communication).
std::unique_ptr<Addresses> resolve(const std::string& host, int port);

// An address and its port as numbers.
struct Numeric {
    std::string address, port;
    std::string text() const;  // 192.0.2.1:22225, [::1]:22225
};
Numeric numeric(const sockaddr* address, socklen_t length);

// Returns true if only this host's processes reach it.
bool is_loopback(const sockaddr* address);

// An address of this host, as a number, and the interface that has it.
struct OwnAddress {
    std::string interface, address;
    bool loopback = false;
};
// All but IPv6's link-local ones, of interfaces that are up; IPv4 first. Throws
// Error(communication).
std::vector<OwnAddress> own_addresses();
// The address of the first of these interfaces, divided by commas, that this host has. Throws
// Error(communication) if it has none of them, or no address there; `variable` names the
// interfaces.
std::string address_of_interface(const std::string& interfaces, const std::string& variable);

constexpr const char* kInterfaceVariable = "GLOO_SOCKET_IFNAME";  // as PyTorch's users know it
// The one address at which this process listens for ranks of other hosts: that of an interface in
// GLOO_SOCKET_IFNAME, or of the network in Open MPI's btl_tcp_if_include, or else the first that
// is not loopback's; empty if there is none. Throws as address_of_interface().
std::string listening_address();

}  // namespace gyre::comm
