// Starting without mpirun where others are at the meeting than the job's ranks, or a rank hangs or
// dies while Gloo connects.
#include <netinet/in.h>
#include <sys/socket.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <fstream>
#include <functional>
#include <future>
#include <memory>
#include <optional>
#include <sstream>
#include <string>
#include <thread>

#include "comm/launch/socket.hpp"
#include "comm/launch/tcp_server.hpp"
#include "tests/program/meeting.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/temp_dir.hpp"

using namespace gyre::test;
using gyre::comm::kGreeting;
using gyre::comm::kNonceBytes;
using gyre::comm::Seal;

namespace {

// Speaks to a meeting as a rank does, and says what it likes.
class Stranger {
 public:
    // Host: 127.0.0.x. Waits for rank 0 to listen there. secret: what this one takes for the job's.
    explicit Stranger(int port, int host = 1, const gyre::comm::Secret& secret = {}) {
        sockaddr_in address{};
        address.sin_family = AF_INET;
        address.sin_addr.s_addr = htonl(0x7f000000U + static_cast<in_addr_t>(host));
        address.sin_port = htons(static_cast<std::uint16_t>(port));
        for (int i = 0; i < 300; ++i) {
            socket_ = gyre::comm::Socket(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
            socket_.set_timeouts(std::chrono::seconds(10));
            if (connect(socket_.fd(), reinterpret_cast<sockaddr*>(&address), sizeof address) == 0) {
                const std::string nonce(kNonceBytes, 'n');
                std::string theirs(kGreeting.size() + kNonceBytes, ' ');
                REQUIRE(socket_.send_all(std::string(kGreeting) + nonce));
                REQUIRE(socket_.receive_all(theirs.data(), theirs.size()));
                const auto job = socket_.receive_frame(100);
                REQUIRE(job);
                seal_ =
                    gyre::comm::store_seal(secret, theirs.substr(kGreeting.size()), nonce, false);
                knows_secret = seal_->open(*job).has_value();
                return;
            }
            std::this_thread::sleep_for(std::chrono::milliseconds(50));
        }
        FAIL("rank 0 does not listen");
    }
    bool send(const std::string& bytes) { return socket_.send_all(bytes); }
    // Nothing: the connection was closed.
    std::optional<std::string> ask(const std::string& request) {
        if (send(gyre::comm::frame(seal_->close(request)))) {
            if (const auto reply = socket_.receive_frame(1 << 20)) {
                return seal_->open(*reply);
            }
        }
        return std::nullopt;
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
    // 5000 times, without a look at the answers.
    void ask_without_reading(const std::string& request) {
        std::string bytes;
        for (int i = 0; i < 5000; ++i) {
            bytes += gyre::comm::frame(seal_->close(request));
        }
        CHECK(send(bytes));
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
    // Connects to each of Gloo's listeners in what a rank says of a context, and returns how many
    // there were. The connections are closed at once, or kept in `held`.
    static int visit_listeners(const std::string& addresses,
                               std::vector<gyre::comm::Socket>* held) {
        int visited = 0;
        for (std::size_t at = 0; at < addresses.size(); at += kGlooAddress) {
            sockaddr_in address{};
            std::memcpy(&address, addresses.data() + at, sizeof address);
            gyre::comm::Socket socket(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
            if (connect(socket.fd(), reinterpret_cast<sockaddr*>(&address), sizeof address) == 0) {
                ++visited;
                if (held != nullptr) {
                    held->push_back(std::move(socket));
                }
            }
        }
        return visited;
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
    std::optional<Seal> seal_;

 public:
    bool knows_secret = false;
};

// Stands between one rank and the meeting at a port, and calls `before` with each key and value
// that the rank sets, before it passes them on.
class Relay {
 public:
    using Before = std::function<void(const std::string& key, const std::string& value)>;
    Relay(int meeting, Before before)
        : work_(std::async(std::launch::async, [this, meeting, before = std::move(before)] {
              pass_on(meeting, before);
          })) {}
    ~Relay() { shutdown(listener_.fd, SHUT_RDWR); }  // if nobody has come
    Relay(const Relay&) = delete;
    Relay& operator=(const Relay&) = delete;
    int port() const { return listener_.port; }
    // Returns once the rank has closed its connection.
    void wait() { work_.get(); }

 private:
    void pass_on(int meeting, const Before& before) const {
        const gyre::comm::Socket rank(accept4(listener_.fd, nullptr, nullptr, SOCK_CLOEXEC));
        const gyre::comm::Socket root(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
        sockaddr_in address{};
        address.sin_family = AF_INET;
        address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
        address.sin_port = htons(static_cast<std::uint16_t>(meeting));
        if (!rank.open() ||
            connect(root.fd(), reinterpret_cast<sockaddr*>(&address), sizeof address) != 0) {
            return;
        }
        const auto back = std::async(std::launch::async, [&] {
            char bytes[4096];
            ssize_t count = 0;
            while ((count = ::recv(root.fd(), bytes, sizeof bytes, 0)) > 0 &&
                   rank.send_all({bytes, static_cast<std::size_t>(count)})) {
            }
            shutdown(rank.fd(), SHUT_RDWR);
        });
        std::string greeting(kGreeting.size() + kNonceBytes, ' ');
        if (rank.receive_all(greeting.data(), greeting.size()) && root.send_all(greeting)) {
            while (const auto request = rank.receive_frame(1 << 20)) {
                // Codes hide nothing.
                const std::string text = request->substr(0, request->size() - Seal::kBytes);
                if (const auto end = text.find('\0'); text.starts_with('S') && end != text.npos) {
                    before(text.substr(1, end - 1), text.substr(end + 1));
                }
                if (!root.send_all(gyre::comm::frame(*request))) {
                    break;
                }
            }
        }
        shutdown(root.fd(), SHUT_RDWR);
    }

    const Listener listener_;
    std::future<void> work_;
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

TEST_CASE("strangers that ask and never read do not keep the ranks from meeting") {
    const int port = free_port();
    Jobs jobs;
    jobs.start(rank_flags(tcp(port), 0, 2, "--init-timeout 20"));
    // If each of them held rank 0 up for 3 s, the ranks would not meet in time.
    std::vector<std::unique_ptr<Stranger>> strangers;
    for (int i = 0; i < 8; ++i) {
        strangers.push_back(std::make_unique<Stranger>(port));
    }
    strangers.front()->set("large", std::string(4000, 'x'));
    for (const auto& stranger : strangers) {
        stranger->ask_without_reading("Flarge");
    }
    jobs.start(rank_flags(tcp(port), 1, 2, "--init-timeout 20"));
    const auto outcomes = jobs.wait();
    for (const Outcome& outcome : outcomes) {
        expect(outcome, 3, {"no-such-set"});  // they have met
    }
    CHECK(outcomes[1].seconds < 10.0);
}

TEST_CASE("a stranger without the job's secret is dropped and named, and the ranks meet") {
    const std::string environment = "GYRE_SECRET=" + std::string(64, 'a');
    const int port = free_port();
    Jobs jobs;
    jobs.start(rank_flags(tcp(port), 0, 2, "--init-timeout 20"), environment);
    for (const auto& secret : {gyre::comm::Secret(), gyre::comm::Secret(std::string(32, 'a'))}) {
        Stranger stranger(port, 1, secret);
        CHECK(!stranger.knows_secret);
        CHECK(stranger.set("rank/1", "x") == "closed");
    }
    Stranger knowing(port, 1, gyre::comm::Secret(std::string(32, '\xaa')));
    CHECK(knowing.knows_secret);
    CHECK(knowing.set("key", "x") == "1");
    CHECK(knowing.ask("Fkey") == "1x");
    jobs.start(rank_flags(tcp(port), 1, 2, "--init-timeout 20"), environment);
    const auto outcomes = jobs.wait();
    expect(outcomes[0], 3, {"no-such-set", "which does not know this job's secret"});
    CHECK(count_of(outcomes[0].output, "does not know this job's secret") == 2);
    expect(outcomes[1], 3, {"no-such-set"});
}

TEST_CASE("strangers that hang up or send rubbish are named, and the ranks meet") {
    const int port = free_port();
    Jobs jobs;
    jobs.start(rank_flags(tcp(port), 0, 2, "--init-timeout 20"));
    { const Stranger first(port); }  // waits for rank 0
    const std::string at = "/dev/tcp/127.0.0.1/" + std::to_string(port);
    CHECK(run_shell("bash -c 'exec 3<>" + at + "; echo GET / >&3; cat <&3 >/dev/null; exec 4<>" +
                    at + "'")
              .exit_code == 0);
    sleep_ms(200);
    jobs.start(rank_flags(tcp(port), 1, 2, "--init-timeout 20"));
    const auto outcomes = jobs.wait();
    expect(outcomes[0], 3,
           {"no-such-set", "dropped a connection from 127.0.0.1:", "which is not gyre's",
            "which said nothing"});
    expect(outcomes[1], 3, {"no-such-set"});
}

TEST_CASE("a rank 0 that is stopped for a while is waited for") {
    const TempDir dir;
    const int port = free_port();
    const std::string pid = (dir.path() / "pid").string();
    Jobs jobs;
    jobs.start_shell(gyre_command(0, rank_flags(tcp(port), 0, 3, "--init-timeout 30")) +
                     " & echo $! >" + pid + "; wait $!");
    jobs.start(rank_flags(tcp(port), 1, 3, "--init-timeout 30"));
    Stranger(port).get("rank/1");
    run_shell("kill -STOP $(cat " + pid + ")");
    jobs.start(rank_flags(tcp(port), 2, 3, "--init-timeout 30"));
    sleep_ms(4500);
    run_shell("kill -CONT $(cat " + pid + ")");
    for (const Outcome& outcome : jobs.wait()) {
        expect(outcome, 3, {"no-such-set"});
    }
}

TEST_CASE("a stranger that connects to Gloo's listeners does not keep the ranks from training") {
    const TempDir dir;
    const std::string data = dir.file("set");
    make_dataset(data, 60, 12, 1, 28, 28, 3);
    for (const int ranks : {2, 3}) {
        for (const bool holds : {false, true}) {
            INFO(ranks << " ranks, " << (holds ? "held" : "closed at once"));
            const int port = free_port();
            Jobs jobs;
            const auto start = [&](int rank, int meeting) {
                jobs.start("train --threads 1 --epochs 1 --batch-size 5 --data " + data +
                           " --init-method " + tcp(meeting) + " --rank " + std::to_string(rank) +
                           " --world-size " + std::to_string(ranks) + " --init-timeout 20");
            };
            for (int rank = 0; rank < ranks - 1; ++rank) {
                start(rank, port);
            }
            // All ranks listen before the last one says where, and none has connected to that one.
            Stranger stranger(port);
            std::vector<gyre::comm::Socket> held;
            int visited = 0;
            const std::string last = "/" + std::to_string(ranks - 1);
            Relay relay(port, [&](const std::string& key, const std::string& value) {
                for (const std::string context : {"control", "gradients"}) {
                    if (key != context + last) {
                        continue;
                    }
                    for (int rank = 0; rank < ranks; ++rank) {
                        visited += Stranger::visit_listeners(
                            rank == ranks - 1 ? value
                                              : stranger.get(context + "/" + std::to_string(rank)),
                            holds ? &held : nullptr);
                    }
                }
            });
            start(ranks - 1, relay.port());
            const auto outcomes = jobs.wait();
            relay.wait();
            expect(outcomes.front(), 0, {"epoch 1/1"});
            for (const Outcome& outcome : outcomes) {
                expect(outcome, 0, {});
            }
            // In both contexts at least the last rank's listeners and those for it; the other ranks
            // may have connected to each other by then.
            CHECK(visited >= 2 * 2 * (ranks - 1));
        }
    }
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
