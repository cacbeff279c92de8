// Addresses of hosts, by their names and in words.
#pragma once

#include <netdb.h>

#include <memory>
#include <string>

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

}  // namespace gyre::comm
