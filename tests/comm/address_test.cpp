// This host's addresses: which are listed, and at which ones its ranks listen.
#include "comm/launch/tcp_address.hpp"

#include <sys/socket.h>

#include <algorithm>
#include <cstdlib>
#include <optional>

#include "comm/watch/link.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/expect_error.hpp"

using namespace gyre;
using namespace gyre::comm;
using gyre::test::expect_error;

namespace {

constexpr const char* kMpiVariable = "OMPI_MCA_btl_tcp_if_include";

// Sets a variable, or removes it, until the end of the scope.
class Variable {
 public:
    Variable(const char* name, const char* value) : name_(name) {
        if (const char* const before = std::getenv(name)) {
            before_ = before;
        }
        value == nullptr ? unsetenv(name) : setenv(name, value, 1);
    }
    ~Variable() { before_ ? setenv(name_, before_->c_str(), 1) : unsetenv(name_); }
    Variable(const Variable&) = delete;
    Variable& operator=(const Variable&) = delete;

 private:
    const char* const name_;
    std::optional<std::string> before_;
};

// The loopback interface and its IPv4 address, by which this host is known here.
OwnAddress loopback() {
    for (const OwnAddress& own : own_addresses()) {
        if (own.loopback) {
            return own;
        }
    }
    FAIL("there is no loopback interface");
    return {};
}

std::string bound_to(const Socket& socket) {
    sockaddr_storage address{};
    socklen_t length = sizeof address;
    auto* const plain = reinterpret_cast<sockaddr*>(&address);
    REQUIRE(getsockname(socket.fd(), plain, &length) == 0);
    return numeric(plain, length).address;
}

}  // namespace

TEST_CASE("an interface is found by its name, and an unknown one is told with those that exist") {
    const OwnAddress own = loopback();
    CHECK(own.address == "127.0.0.1");
    CHECK(address_of_interface(own.interface, "A_VARIABLE") == own.address);
    expect_error(ExitCode::communication,
                 {"A_VARIABLE=nothing0", own.interface + " (127.0.0.1)", "it has: "},
                 [] { address_of_interface("nothing0", "A_VARIABLE"); });
}

TEST_CASE("ranks listen at the address that the variables name, or else at an outside one") {
    const OwnAddress own = loopback();
    const std::vector<OwnAddress> all = own_addresses();
    const auto outside =
        std::find_if(all.begin(), all.end(), [](const OwnAddress& a) { return !a.loopback; });
    const std::string by_itself = outside == all.end() ? "" : outside->address;
    {
        const Variable gloo(kInterfaceVariable, nullptr);
        {
            const Variable mpi(kMpiVariable, nullptr);
            CHECK(listening_address() == by_itself);
        }
        for (const char* networks :
             {"127.0.0.0/8", "nothing0,127.0.0.1/32", "255.255.255.255/32,127.0.0.0/8"}) {
            INFO(networks);
            const Variable mpi(kMpiVariable, networks);
            CHECK(listening_address() == own.address);
        }
        {
            const Variable mpi(kMpiVariable, own.interface.c_str());
            CHECK(listening_address() == own.address);
        }
        // A list without a network of this host, and a word that is not a list.
        for (const char* networks : {"nothing0", "127.0.0.0/33", "127.0.0.0/x", "/8", ",", ""}) {
            INFO(networks);
            const Variable mpi(kMpiVariable, networks);
            CHECK(listening_address() == by_itself);
        }
    }
    const Variable mpi(kMpiVariable, "nothing0");
    const Variable gloo(kInterfaceVariable, own.interface.c_str());
    CHECK(listening_address() == own.address);
    {
        const Variable several(kInterfaceVariable, ("nothing0," + own.interface).c_str());
        CHECK(listening_address() == own.address);
    }
    const Variable unknown(kInterfaceVariable, "nothing0");
    expect_error(ExitCode::communication, {"GLOO_SOCKET_IFNAME=nothing0"},
                 [] { listening_address(); });
}

TEST_CASE("a listener is bound to its one address") {
    std::uint16_t port = 0;
    const Socket listener = listen_at("127.0.0.1", port);
    REQUIRE(listener.open());
    CHECK(port > 0);
    CHECK(bound_to(listener) == "127.0.0.1");
    CHECK(connect_to("127.0.0.1", port, 2000).open());
    // The same port of another address of this host, which a listener at all of them would answer.
    CHECK(!connect_to("127.0.0.2", port, 2000).open());
    for (const char* address : {"", "localhost", "240.0.0.1"}) {  // no number, or not this host's
        INFO(address);
        std::uint16_t none = 0;
        CHECK(!listen_at(address, none).open());
        CHECK(none == 0);
    }
}
