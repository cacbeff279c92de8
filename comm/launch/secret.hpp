// The secret of a job, which its ranks share and strangers do not, and messages that only those can
// make who know it.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace gyre::comm {

// Random bytes of the system.
std::string random_bytes(std::size_t count);

class Secret {
 public:
    static constexpr std::size_t kBytes = 32;

    // None: anybody can make the messages.
    Secret() = default;
    // `bytes`: kBytes of them.
    explicit Secret(const std::string& bytes);
    // Reads GYRE_SECRET, 64 hexadecimal digits, or else the file that GYRE_SECRET_FILE names,
    // which nobody but its owner may read; none if neither is set. Throws usage_error.
    static Secret of_environment();

    bool known() const { return known_; }
    const std::array<char, kBytes>& bytes() const { return bytes_; }

 private:
    std::array<char, kBytes> bytes_ = {};
    bool known_ = false;
};

// 64 hexadecimal digits that only those can make of this text who know the secret.
std::string code_text(const Secret& secret, std::string_view text);

// One side of a connection. Each message gets a code, HMAC-SHA256 (RFC 2104) over its number and
// its bytes with a key of the connection and the direction. So a side notices messages that
// somebody else has made, or that come from another connection, a second time or in another order.
class Seal {
 public:
    static constexpr std::size_t kBytes = 32;  // of a code

    // `connection`: what tells it from all others of this secret, such as numbers that both sides
    // have just drawn; the same on both sides, of which one is the server.
    Seal(const Secret& secret, std::string_view connection, bool server);

    // Returns the message and its code.
    std::string close(std::string_view message);
    // Returns the message in what close() made on the other side, if it is the next one.
    std::optional<std::string> open(std::string_view closed);

 private:
    std::array<char, kBytes> out_, in_;  // keys
    std::uint64_t sent_ = 0, received_ = 0;
};

}  // namespace gyre::comm
