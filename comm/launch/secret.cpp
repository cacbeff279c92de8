#include "comm/launch/secret.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <openssl/hmac.h>
#include <sys/random.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>

#include "base/descriptor.hpp"
#include "base/error.hpp"
#include "comm/launch/meeting_error.hpp"

namespace gyre::comm {
namespace {

using Code = std::array<char, Seal::kBytes>;

Code code_of(std::string_view key, std::string_view text) {
    Code code{};
    unsigned length = 0;
    if (HMAC(EVP_sha256(), key.data(), static_cast<int>(key.size()),
             reinterpret_cast<const unsigned char*>(text.data()), text.size(),
             reinterpret_cast<unsigned char*>(code.data()), &length) == nullptr ||
        length != code.size()) {
        throw Error(ExitCode::internal, "OpenSSL's HMAC with SHA-256 failed");
    }
    return code;
}

std::string_view text_of(const Code& code) {
    return {code.data(), code.size()};
}

std::string numbered(std::uint64_t number, std::string_view message) {
    std::string text;
    for (int shift = 56; shift >= 0; shift -= 8) {
        text.push_back(static_cast<char>(number >> shift & 0xff));
    }
    return text.append(message);
}

constexpr const char* kHowToMake =
    "a secret has 64 hexadecimal digits, such as `openssl rand -hex 32` prints";

// Reads a file that only its owner may read.
std::string read_private(const std::string& path) {
    const auto fail = [&](const std::string& what) {
        return usage_error(fmt::format("GYRE_SECRET_FILE {}: {}", path, what));
    };
    const Descriptor file(open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
    if (!file.open()) {
        throw fail(error_text(errno));
    }
    struct stat facts = {};
    std::array<char, 256> text{};
    const bool known = fstat(file.fd(), &facts) == 0 && S_ISREG(facts.st_mode);
    const ssize_t bytes = known ? read(file.fd(), text.data(), text.size()) : -1;
    if (bytes < 0) {
        throw fail("it is not a file that can be read");
    }
    if ((facts.st_mode & 0077) != 0) {
        throw fail("others may read or write it; run chmod 600 on it");
    }
    std::string read(text.data(), static_cast<std::size_t>(bytes));
    read.erase(read.find_last_not_of(" \n\r\t") + 1);
    return read;
}

std::string bytes_of(const std::string& hex, const std::string& where) {
    const auto digit = [](char c) {
        return c >= '0' && c <= '9'   ? c - '0'
               : c >= 'a' && c <= 'f' ? c - 'a' + 10
               : c >= 'A' && c <= 'F' ? c - 'A' + 10
                                      : -1;
    };
    if (hex.size() != 2 * Secret::kBytes ||
        std::any_of(hex.begin(), hex.end(), [&](char c) { return digit(c) < 0; })) {
        throw usage_error(fmt::format("{}: {}", where, kHowToMake));  // without what is there
    }
    std::string bytes;
    for (std::size_t i = 0; i < hex.size(); i += 2) {
        bytes.push_back(static_cast<char>(digit(hex[i]) << 4 | digit(hex[i + 1])));
    }
    return bytes;
}

}  // namespace

std::string random_bytes(std::size_t count) {
    std::string bytes(count, '\0');
    for (std::size_t done = 0; done < count;) {
        const ssize_t got = getrandom(bytes.data() + done, count - done, 0);
        if (got < 0 && errno != EINTR) {
            throw Error(ExitCode::internal, fmt::format("getrandom failed: {}", error_text(errno)));
        }
        done += got > 0 ? static_cast<std::size_t>(got) : 0;
    }
    return bytes;
}

Secret::Secret(const std::string& bytes) : known_(true) {
    std::copy_n(bytes.begin(), kBytes, bytes_.begin());
}

Secret Secret::of_environment() {
    const char* const hex = std::getenv("GYRE_SECRET");
    if (hex != nullptr) {
        return Secret(bytes_of(hex, "GYRE_SECRET"));
    }
    const char* const path = std::getenv("GYRE_SECRET_FILE");
    return path == nullptr
               ? Secret()
               : Secret(bytes_of(read_private(path), fmt::format("GYRE_SECRET_FILE {}", path)));
}

std::string code_text(const Secret& secret, std::string_view text) {
    std::string digits;
    for (const char byte : code_of({secret.bytes().data(), secret.bytes().size()}, text)) {
        digits += fmt::format("{:02x}", static_cast<unsigned char>(byte));
    }
    return digits;
}

Seal::Seal(const Secret& secret, std::string_view connection, bool server) {
    const std::string_view key(secret.bytes().data(), secret.bytes().size());
    const Code of_server = code_of(key, std::string("server ").append(connection));
    const Code of_client = code_of(key, std::string("client ").append(connection));
    out_ = server ? of_server : of_client;
    in_ = server ? of_client : of_server;
}

std::string Seal::close(std::string_view message) {
    const Code code = code_of(text_of(out_), numbered(sent_++, message));
    return std::string(message).append(text_of(code));
}

std::optional<std::string> Seal::open(std::string_view closed) {
    if (closed.size() < kBytes) {
        return std::nullopt;
    }
    const std::string_view message = closed.substr(0, closed.size() - kBytes);
    const Code code = code_of(text_of(in_), numbered(received_, message));
    if (CRYPTO_memcmp(code.data(), closed.data() + message.size(), kBytes) != 0) {
        return std::nullopt;
    }
    ++received_;
    return std::string(message);
}

}  // namespace gyre::comm
