// The ranks' store over TCP: rank 0 serves it (comm/launch/tcp_server.hpp), the others ask.
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <mutex>
#include <thread>

#include "base/clock.hpp"
#include "base/host_name.hpp"
#include "base/printable.hpp"
#include "comm/launch/meeting_error.hpp"
#include "comm/launch/rendezvous.hpp"
#include "comm/launch/socket.hpp"
#include "comm/launch/tcp_address.hpp"
#include "comm/launch/tcp_server.hpp"

namespace gyre::comm {
namespace {

using namespace std::chrono_literals;

constexpr auto kConnectInterval = 50ms;  // to a rank 0 that is not there yet
constexpr auto kAnswerTime = 3s;         // of one attempt to hear that gyre listens
constexpr auto kLateTime = 5s;  // after the deadline, for the answers that a start still asks for
constexpr std::size_t kMostJobId = 4096;

class TcpStore final : public Store {
 public:
    TcpStore(const StartUp& start_up, double timeout_seconds)
        : start_up_(start_up), limits_(start_up.world_size) {
        deadline = deadline_in(timeout_seconds);
        address_ = start_up.host;
        port_ = std::to_string(start_up.ports.front());
        require_secret();
        start_up.rank == 0 ? listen() : connect();
    }

    bool set(const std::string& key, const std::string& value) override {
        const std::string result = value.size() > limits_.value ? "2"
                                   : server_ ? std::string{server_->set(key, value)}
                                             : ask("S" + key + '\0' + value);
        if (result == "2") {
            throw meeting_error(fmt::format(
                "the meeting at {} is full: somebody else writes to it, too; choose another port, "
                "in a network that you trust",
                where()));
        }
        return result == "1";
    }
    std::optional<std::string> find(const std::string& key) override {
        if (server_) {
            return server_->find(key);
        }
        const std::string reply = ask("F" + key);
        return reply.starts_with('1') ? std::optional(reply.substr(1)) : std::nullopt;
    }
    std::string where() const override {
        return fmt::format("tcp://{}", Numeric{start_up_.host, port_}.text());
    }
    std::string remedy() const override {
        return "wait for the other job's end, or choose another port";
    }
    std::string local_address() const override { return address_; }

 private:
    // Refuses a meeting without a secret where others than this host's processes reach it.
    void require_secret() const;
    void listen();
    void connect();
    // Empty if a job of this id answers; otherwise what is wrong. `fatal`: retrying is useless.
    std::string try_connect(int port, bool& fatal);

    std::string ask(const std::string& request) {
        const std::lock_guard lock(mutex_);
        const auto begin = Clock::now();
        // Rank 0 may be busy, or stopped for a while.
        connection_.set_timeouts(time_until(deadline + kLateTime, kAnswerTime));
        if (lost_.empty() && connection_.send_all(frame(seal_->close(request)))) {
            if (const auto reply = connection_.receive_frame(limits_.value + 1 + Seal::kBytes)) {
                if (auto opened = seal_->open(*reply)) {
                    return *opened;
                }
                lost_ = fmt::format(
                    "what came from {} was not made by rank 0, or was changed on the way", where());
            }
        }
        if (lost_.empty()) {
            const bool ended = errno == 0 || errno == ECONNRESET || errno == EPIPE;
            const bool late = errno == EAGAIN || errno == EWOULDBLOCK;
            lost_ = late ? fmt::format(
                               "{} 0 at {} has not answered for {:.0f} s during the start: "
                               "stopped, or its host or network is gone",
                               start_up_.words.member, where(), seconds_since(begin))
                         : fmt::format(
                               "{} 0 at {} closed the connection during the start ({}); "
                               "see its message",
                               start_up_.words.member, where(),
                               ended ? "its process has ended" : error_text(errno));
        }
        throw meeting_error(lost_);
    }

    // From now, and at least this.
    static std::chrono::milliseconds time_until(Clock::time_point end,
                                                std::chrono::milliseconds least) {
        return std::max(least,
                        std::chrono::duration_cast<std::chrono::milliseconds>(end - Clock::now()));
    }

    const StartUp start_up_;
    const StoreLimits limits_;
    std::mutex mutex_;  // guards the connection
    std::string lost_;  // why it can no longer be used
    std::string address_, port_;
    std::unique_ptr<TcpServer> server_;  // on rank 0
    Socket connection_;                  // on the others
    std::optional<Seal> seal_;           // of connection_
};

void TcpStore::require_secret() const {
    if (start_up_.secret.known()) {
        return;
    }
    const auto addresses = resolve(start_up_.host, start_up_.ports.front());
    for (const addrinfo* at = addresses->first; at != nullptr; at = at->ai_next) {
        if (is_loopback(at->ai_addr)) {
            continue;
        }
        const std::string address = numeric(at->ai_addr, at->ai_addrlen).address;
        if (!start_up_.insecure) {
            throw meeting_error(fmt::format(
                "the ranks would meet at {} ({}), which other hosts reach, without a secret, so "
                "that whoever finds the port can join or end the job; give all ranks the same "
                "GYRE_SECRET (64 hexadecimal digits: export GYRE_SECRET=$(openssl rand -hex 32)), "
                "or `insecure` in a network that you trust",
                where(), address));
        }
        if (start_up_.rank == 0) {
            fmt::print(stderr,
                       "gyre: the ranks meet at {} ({}) without a secret: whoever reaches it can "
                       "join or end this job\n",
                       where(), address);
        }
        return;
    }
}

void TcpStore::listen() {
    std::string taken;
    for (const int port : start_up_.ports) {
        const auto addresses = resolve(start_up_.host, port);
        for (const addrinfo* at = addresses->first; at != nullptr; at = at->ai_next) {
            Socket listener(::socket(at->ai_family, at->ai_socktype | SOCK_CLOEXEC, 0));
            const int yes = 1;
            if (listener.fd() >= 0) {
                // A port whose last job has just ended can be used at once.
                setsockopt(listener.fd(), SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
            }
            if (listener.fd() < 0 || bind(listener.fd(), at->ai_addr, at->ai_addrlen) != 0 ||
                ::listen(listener.fd(), SOMAXCONN) != 0) {
                const int error = errno;
                if (error == EADDRINUSE) {
                    port_ = std::to_string(port);
                    bool fatal = false;
                    const std::string reason = try_connect(port, fatal);
                    taken = fmt::format(
                        "{} 0 cannot listen on {}: {}; {}", start_up_.words.member, where(),
                        reason.empty() ? "a gyre job already does" : reason, remedy());
                    break;
                }
                if (taken.empty()) {
                    taken = fmt::format(
                        "{0} 0 cannot listen on {1}: {2}; give an address of this "
                        "host ({3}), where {0} 0 runs",
                        start_up_.words.member, numeric(at->ai_addr, at->ai_addrlen).text(),
                        error_text(error), host_name());
                }
                continue;
            }
            const Numeric name = numeric(at->ai_addr, at->ai_addrlen);
            address_ = name.address;
            port_ = name.port;
            server_ = std::make_unique<TcpServer>(std::move(listener), start_up_);
            return;
        }
    }
    throw meeting_error(taken);
}

std::string TcpStore::try_connect(int port, bool& fatal) {
    std::string trouble;
    const auto addresses = resolve(start_up_.host, port);
    for (const addrinfo* at = addresses->first; at != nullptr; at = at->ai_next) {
        const std::string name = numeric(at->ai_addr, at->ai_addrlen).text();
        Socket socket(::socket(at->ai_family, at->ai_socktype | SOCK_CLOEXEC, 0));
        if (socket.fd() < 0) {
            trouble = error_text(errno);
            continue;
        }
        // Also the longest that connect() takes, for a host that does not answer at all.
        const auto answer_time =
            std::min<std::chrono::milliseconds>(kAnswerTime, time_until(deadline, 100ms));
        socket.set_timeouts(answer_time);
        if (::connect(socket.fd(), at->ai_addr, at->ai_addrlen) != 0) {
            trouble =
                fmt::format("{}: {}", name, errno == EINPROGRESS ? "no answer" : error_text(errno));
            continue;
        }
        const std::string nonce = random_bytes(kNonceBytes);
        std::string greeting(kGreeting.size() + kNonceBytes, '\0');
        errno = 0;
        const bool greeted = socket.send_all(std::string(kGreeting) + nonce) &&
                             socket.receive_all(greeting.data(), greeting.size()) &&
                             greeting.starts_with(kGreeting);
        const auto job = greeted ? socket.receive_frame(kMostJobId + Seal::kBytes) : std::nullopt;
        if (!job && (errno == EAGAIN || errno == EWOULDBLOCK)) {
            trouble = fmt::format(
                "what listens at {} has not answered for {:.2g} s: it is stopped, busy, or not "
                "gyre",
                name, std::chrono::duration<double>(answer_time).count());
            continue;
        }
        if (!job || job->size() < Seal::kBytes) {
            trouble = fmt::format(
                "what listens there is not gyre, or another version of it (another program uses "
                "{})",
                name);
            fatal = true;
            continue;
        }
        const std::string theirs = job->substr(0, job->size() - Seal::kBytes);
        if (theirs != start_up_.job_id) {
            trouble = fmt::format("another gyre job uses {} (its job id is '{}', this one's '{}')",
                                  name, printable(theirs), printable(start_up_.job_id));
            fatal = true;
            continue;
        }
        Seal seal = store_seal(start_up_.secret, greeting.substr(kGreeting.size()), nonce, false);
        if (!seal.open(*job)) {
            trouble =
                fmt::format("the job at {} has {}; give all ranks the same GYRE_SECRET", name,
                            start_up_.secret.known() ? "another secret than this rank, or none"
                                                     : "a secret, and this rank has none");
            fatal = true;
            continue;
        }
        sockaddr_storage local{};
        socklen_t length = sizeof local;
        if (getsockname(socket.fd(), reinterpret_cast<sockaddr*>(&local), &length) != 0) {
            trouble = error_text(errno);
            continue;
        }
        address_ = numeric(reinterpret_cast<sockaddr*>(&local), length).address;
        port_ = std::to_string(port);
        connection_ = std::move(socket);
        seal_ = seal;
        return {};
    }
    return trouble;
}

void TcpStore::connect() {
    for (;;) {
        std::string trouble;
        for (const int port : start_up_.ports) {
            bool fatal = false;
            trouble = try_connect(port, fatal);
            if (trouble.empty()) {
                return;
            }
            // Among several ports, others' are passed over.
            if (fatal && start_up_.ports.size() == 1) {
                throw meeting_error(fmt::format("{} {} cannot join at {}: {}; {}",
                                                start_up_.words.member, start_up_.rank, where(),
                                                trouble, start_up_.words.apart));
            }
        }
        if (Clock::now() + kConnectInterval > deadline) {
            throw meeting_error(
                fmt::format("{0} {1} on {2} has not found {0} 0 at {3} within {4}: {5}; missing: "
                            "{0} 0 (the others meet there). Start {0} 0 with the same {6}, on the "
                            "host of that address, and check that no firewall closes the port",
                            start_up_.words.member, start_up_.rank, host_name(), where(),
                            start_up_.words.time_limit, trouble, start_up_.words.flags));
        }
        std::this_thread::sleep_for(kConnectInterval);
    }
}

}  // namespace

std::unique_ptr<Store> make_tcp_store(const StartUp& start_up, double timeout_seconds) {
    return std::make_unique<TcpStore>(start_up, timeout_seconds);
}

}  // namespace gyre::comm
