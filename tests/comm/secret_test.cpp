// The codes of messages between ranks: whose are taken and whose are not.
#include "comm/launch/secret.hpp"

#include <sys/stat.h>

#include <cstdlib>
#include <fstream>

#include "tests/support/catch.hpp"
#include "tests/support/expect_error.hpp"
#include "tests/support/temp_dir.hpp"

using namespace gyre;
using namespace gyre::comm;
using gyre::test::expect_error;

namespace {

struct Pair {
    explicit Pair(const Secret& secret, const std::string& connection = "a")
        : server(secret, connection, true), client(secret, connection, false) {}
    Seal server, client;
};

const Secret kSecret(std::string(32, 'x')), kOther(std::string(31, 'x') + 'y');

}  // namespace

TEST_CASE("a sealed message is opened by the other side, once and in order") {
    Pair sides(kSecret);
    const std::string first = sides.client.close("one"), second = sides.client.close("");
    CHECK(first.size() == 3 + Seal::kBytes);
    CHECK(!sides.server.open(second));  // out of order
    CHECK(sides.server.open(first) == "one");
    CHECK(!sides.server.open(first));  // again
    CHECK(sides.server.open(second) == "");
    CHECK(sides.client.open(sides.server.close("back")) == "back");
    // Nor by the side that has made it.
    CHECK(!sides.client.open(sides.client.close("mine")));
}

TEST_CASE("messages of others are not opened, and no bit of a message can be changed") {
    Pair sides(kSecret), without{Secret()}, others(kOther), elsewhere(kSecret, "b");
    for (Pair* pair : {&without, &others, &elsewhere}) {
        CHECK(!sides.server.open(pair->client.close("one")));
    }
    const std::string sealed = sides.client.close("one");
    for (std::size_t bit = 0; bit < 8 * sealed.size(); ++bit) {
        std::string changed = sealed;
        changed[bit / 8] = static_cast<char>(changed[bit / 8] ^ (1 << bit % 8));
        CHECK(!sides.server.open(changed));
    }
    for (std::size_t bytes = 0; bytes < sealed.size(); ++bytes) {
        CHECK(!sides.server.open(sealed.substr(0, bytes)));
    }
    CHECK(!sides.server.open(sealed + '\0'));
    CHECK(sides.server.open(sealed) == "one");
}

// The expected codes are Python's.
TEST_CASE("codes are HMAC-SHA256") {
    // import hmac; hmac.new(b"x" * 32, b"token 1", "sha256").hexdigest()
    CHECK(code_text(kSecret, "token 1") ==
          "fabb919a35d9992586ca837732eb03589c9a5ff2bfb12e703a5e5a8dfc49dc6d");
    Seal server(kSecret, "a", true);
    const std::string sealed = server.close("one");
    std::string digits;
    for (const char byte : sealed.substr(3)) {
        const char* const hex = "0123456789abcdef";
        digits += {hex[static_cast<unsigned char>(byte) >> 4], hex[byte & 15]};
    }
    // key = hmac.new(b"x" * 32, b"server a", "sha256").digest()
    // hmac.new(key, bytes(8) + b"one", "sha256").hexdigest()
    CHECK(digits == "b881e00794b646643c1126aaa95b575a5034f5d7b1f401551cd9ee0a67ab40c0");
}

TEST_CASE("a secret comes from the environment, or from a file that only its owner may read") {
    const gyre::test::TempDir dir;
    const std::string hex(64, 'a'), path = dir.file("secret");
    const auto write = [&](const std::string& text, mode_t mode) {
        std::ofstream(path) << text;
        REQUIRE(chmod(path.c_str(), mode) == 0);
    };
    unsetenv("GYRE_SECRET");
    unsetenv("GYRE_SECRET_FILE");
    CHECK(!Secret::of_environment().known());
    setenv("GYRE_SECRET_FILE", path.c_str(), 1);
    expect_error(ExitCode::usage, {"GYRE_SECRET_FILE", path, "No such file"},
                 [] { Secret::of_environment(); });
    write(hex + "\n", 0600);
    CHECK(Secret::of_environment().bytes() == Secret(std::string(32, '\xaa')).bytes());
    write(hex, 0640);
    expect_error(ExitCode::usage, {path, "others may read or write it", "chmod 600"},
                 [] { Secret::of_environment(); });
    write(hex + "0", 0600);
    expect_error(ExitCode::usage, {path, "64 hexadecimal digits"},
                 [] { Secret::of_environment(); });
    setenv("GYRE_SECRET_FILE", dir.path().c_str(), 1);
    expect_error(ExitCode::usage, {"it is not a file"}, [] { Secret::of_environment(); });
    setenv("GYRE_SECRET", std::string(64, 'B').c_str(), 1);  // counts before the file
    CHECK(Secret::of_environment().bytes() == Secret(std::string(32, '\xbb')).bytes());
    for (const std::string bad : {"", "abc", "gg"}) {
        setenv("GYRE_SECRET", (bad == "gg" ? std::string(64, 'g') : bad).c_str(), 1);
        expect_error(ExitCode::usage, {"GYRE_SECRET: a secret has 64 hexadecimal digits"},
                     [] { Secret::of_environment(); });
    }
    unsetenv("GYRE_SECRET");
    unsetenv("GYRE_SECRET_FILE");
    CHECK(random_bytes(32) != random_bytes(32));
    CHECK(random_bytes(300).size() == 300);
}
