// Starting without mpirun where others are at the meeting than the job's ranks, or a rank hangs or
// dies while Gloo connects.
#include <netinet/in.h>
#include <sys/socket.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <fstream>
#include <memory>
#include <optional>
#include <sstream>
#include <string>
#include <thread>

#include "comm/launch/socket.hpp"
#include "tests/catch.hpp"
#include "tests/meeting.hpp"
#include "tests/temp_dir.hpp"

using namespace gyre::test;

namespace {

// Speaks to a meeting as a rank does, and says what it likes.
class Stranger {
 public:
    // Host: 127.0.0.x. Waits for rank 0 to listen there.
    explicit Stranger(int port, int host = 1) {
        sockaddr_in address{};
        address.sin_family = AF_INET;
        address.sin_addr.s_addr = htonl(0x7f000000U + static_cast<in_addr_t>(host));
        address.sin_port = htons(static_cast<std::uint16_t>(port));
        for (int i = 0; i < 300; ++i) {
            socket_ = gyre::comm::Socket(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
            socket_.set_timeouts(std::chrono::seconds(10));
            if (connect(socket_.fd(), reinterpret_cast<sockaddr*>(&address), sizeof address) == 0) {
                constexpr std::string_view greeting = "gyre rendezvous 1\n";
                std::string theirs(greeting.size(), ' ');
                REQUIRE(socket_.send_all(greeting));
                REQUIRE(socket_.receive_all(theirs.data(), theirs.size()));
                REQUIRE(socket_.receive_frame(100));
                return;
            }
            std::this_thread::sleep_for(std::chrono::milliseconds(50));
        }
        FAIL("rank 0 does not listen");
    }
    bool send(const std::string& bytes) { return socket_.send_all(bytes); }
    // Nothing: the connection was closed.
    std::optional<std::string> ask(const std::string& request) {
        return send(gyre::comm::frame(request)) ? socket_.receive_frame(1 << 20) : std::nullopt;
    }
    std::string set(const std::string& key, const std::string& value) {
        return ask("S" + key + '\0' + value).value_or("closed");
    }
    // Waits for it.
    std::string get(const std::string& key) {
        for (int i = 0; i < 500; ++i) {
            const auto reply = ask("F" + key);
            REQUIRE(reply);
            if (reply->starts_with('1')) {
                return reply->substr(1);
            }
            std::this_thread::sleep_for(std::chrono::milliseconds(20));
        }
        FAIL(key << " is not said");
        return {};
    }
    bool closed() {
        char byte = 0;
        return !socket_.receive_all(&byte, 1) && errno != EAGAIN;
    }
    // Comes as a rank on another host of this name.
    void join(int rank, const std::string& host) {
        std::istringstream lines(get("rank/0"));
        std::string facts, line;
        for (int at = 0; std::getline(lines, line); ++at) {
            facts += (at == 3 ? host : at == 4 ? "elsewhere" : line) + "\n";
        }
        REQUIRE(set("rank/" + std::to_string(rank), facts) == "1");
        get("all");
    }
    // Says where Gloo finds this rank of a context: at addresses like rank 0's, but of this host
    // and port.
    void say_address(const std::string& context, int rank, in_addr_t host, int port) {
        const std::string number = std::to_string(rank);
        REQUIRE(set(context + "/rank_" + number, "elsewhere") == "1");
        std::string bytes = get(context + "/0");
        REQUIRE(bytes.size() % kGlooAddress == 0);
        sockaddr_in address{};
        for (std::size_t at = 0; at < bytes.size(); at += kGlooAddress) {
            std::memcpy(&address, bytes.data() + at, sizeof address);
            address.sin_addr.s_addr = htonl(host);
            address.sin_port = htons(static_cast<std::uint16_t>(port));
            std::memcpy(bytes.data() + at, &address, sizeof address);
        }
        REQUIRE(set(context + "/" + number, bytes) == "1");
    }

 private:
    static constexpr std::size_t kGlooAddress = sizeof(sockaddr_storage) + 8;
    gyre::comm::Socket socket_;
};

}  // namespace

TEST_CASE("a frame's length is believed only up to a limit") {
    int ends[2];
    REQUIRE(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) == 0);
    const gyre::comm::Socket here(ends[0]), there(ends[1]);
    REQUIRE(there.send_all(gyre::comm::frame("abc") + std::string("\x10\0\0\0", 4)));  // 256 MiB
    CHECK(here.receive_frame(3).value_or("") == "abc");
    const auto peak_kib = [] {
        std::ifstream status("/proc/self/status");
        for (std::string line; std::getline(status, line);) {
            if (line.starts_with("VmHWM:")) {
                return std::stol(line.substr(6));
            }
        }
        return 0L;
    };
    const long before = peak_kib();
    CHECK(!here.receive_frame(1 << 20));
    CHECK(peak_kib() - before < 100'000);
}

TEST_CASE("strangers at the meeting: no more than a meeting needs is kept") {
    const int port = free_port();
    Jobs jobs;
    jobs.start(rank_flags(tcp(port), 0, 3, "--init-timeout 4"));
    Stranger first(port);
    CHECK(first.send("\xff\xff\xff\xff rubbish"));
    CHECK(first.closed());
    Stranger large(port);
    CHECK(large.set("large", std::string(1 << 20, 'x')) == "closed");
    Stranger many(port);
    std::size_t taken = 0;
    while (taken < (16 << 20) && many.set(std::to_string(taken), std::string(4000, 'x')) == "1") {
        taken += 4000;
    }
    CHECK(taken < (2 << 20));
    for (int i = 0; i < 4000 && many.set("small" + std::to_string(i), "x") == "1"; ++i) {
    }
    // Nor more connections: the oldest goes.
    std::vector<std::unique_ptr<Stranger>> crowd;
    for (int i = 0; i < 70; ++i) {
        crowd.push_back(std::make_unique<Stranger>(port));
    }
    CHECK(crowd.front()->closed());
    expect(run_gyre(0, rank_flags(tcp(port), 1, 3)), 4, {"the meeting at", "is full"});
    expect(jobs.wait().at(0), 4, {"missing: ranks 1, 2"});
}

TEST_CASE("a stranger that comes as a rank ends the job with a message, which is only text") {
    const int port = free_port();
    Jobs jobs;
    jobs.start(rank_flags(tcp(port), 0, 2, "--init-timeout 20"));
    const auto start = std::chrono::steady_clock::now();
    Stranger(port).join(1, "\x1b]0;owned\x07\xc2\x9b");
    const Outcome outcome = jobs.wait().at(0);
    expect(outcome, 4, {"rank 1 on \\x1b]0;owned\\x07\\xc2\\x9b has ended during the start"});
    CHECK(outcome.output.find('\x1b') == std::string::npos);
    CHECK(outcome.output.find('\x9b') == std::string::npos);
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
    CHECK(seconds.count() < 10.0);
}

TEST_CASE("a rank that hangs while Gloo connects ends the start soon after its time") {
    const int port = free_port();
    Jobs jobs;
    jobs.start(rank_flags(tcp(port, "127.0.0.2"), 0, 2, "--init-timeout 1 --timeout 20"));
    // Rank 0 has the higher address, and so connects to the stranger, which never answers.
    const Listener silent;
    Stranger stranger(port, 2);
    stranger.join(1, "b");
    for (const char* context : {"control", "gradients"}) {
        stranger.say_address(context, 1, INADDR_LOOPBACK, silent.port);
    }
    const Outcome outcome = jobs.wait().at(0);
    expect(outcome, 4, {"--init-timeout", "rank 1 on b has been silent for"});
    CHECK(outcome.seconds < 12.0);
}

TEST_CASE("a killed rank 0 does not leave the others waiting while Gloo connects") {
    const TempDir dir;
    const int port = free_port();
    const std::string pid = (dir.path() / "pid").string();
    Jobs jobs;
    jobs.start_shell(gyre_command(0, rank_flags(tcp(port), 0, 3, "--init-timeout 20")) +
                     " & echo $! >" + pid + "; wait $!");
    jobs.start(rank_flags(tcp(port), 1, 3, "--init-timeout 20"));
    // Has the higher address, and so is waited for.
    Stranger stranger(port);
    stranger.join(2, "b");
    stranger.say_address("control", 2, 0x7ffffffeU, 1);
    stranger.get("control/1");
    sleep_ms(300);
    const auto start = std::chrono::steady_clock::now();
    run_shell("kill -KILL $(cat " + pid + ")");
    expect(jobs.wait().at(1), 4, {"rank 0", "its process has ended"});
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
    CHECK(seconds.count() < 5.0);
}
