// The ranks' store over TCP: rank 0 serves it, the others ask.
//
// Both sides first send a line that says that this is gyre, and the job's id; then the client asks
// and rank 0 answers, frame by frame. There is no secret in it: whoever reaches the port can
// disturb the start, as with mpirun.
#include <fmt/format.h>
#include <netdb.h>
#include <poll.h>
#include <sys/eventfd.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <map>
#include <mutex>
#include <sstream>
#include <thread>

#include "base/clock.hpp"
#include "base/host_name.hpp"
#include "base/printable.hpp"
#include "comm/launch/meeting_error.hpp"
#include "comm/launch/rendezvous.hpp"
#include "comm/launch/socket.hpp"

namespace gyre::comm {
namespace {

using namespace std::chrono_literals;

constexpr std::string_view kGreeting = "gyre rendezvous 1\n";
constexpr auto kConnectInterval = 50ms;  // to a rank 0 that is not there yet
constexpr auto kAnswerTime = 3s;         // of one attempt to hear that gyre listens
constexpr auto kLateTime = 5s;    // after the deadline, for the answers that a start still asks for
constexpr auto kSilentTime = 2s;  // after which a rank that starts counts as not heard of
constexpr std::size_t kMostStrangers = 64;  // connections that belong to no rank
constexpr std::size_t kMostJobId = 4096;
constexpr int kMostWarnings = 8;  // of strangers

struct Addresses {
    addrinfo* first = nullptr;
    ~Addresses() {
        if (first != nullptr) {
            freeaddrinfo(first);
        }
    }
};

// The addresses of a host name, in the system's order, which is the same for all ranks of a host.
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

// An address and its port as numbers.
struct Numeric {
    std::string address, port;
    std::string text() const {
        return address.find(':') == std::string::npos ? fmt::format("{}:{}", address, port)
                                                      : fmt::format("[{}]:{}", address, port);
    }
};

Numeric numeric(const sockaddr* address, socklen_t length) {
    std::array<char, NI_MAXHOST> host{};
    std::array<char, NI_MAXSERV> port{};
    if (getnameinfo(address, length, host.data(), host.size(), port.data(), port.size(),
                    NI_NUMERICHOST | NI_NUMERICSERV) != 0) {
        return {"an unknown address", "0"};
    }
    return {host.data(), port.data()};
}

// The keys and values that rank 0 serves to the others, by a thread of its own.
class Server {
 public:
    Server(Socket listener, const StartUp& start_up)
        : listener_(std::move(listener)),
          wake_(eventfd(0, EFD_CLOEXEC)),
          job_id_(start_up.job_id),
          limits_(start_up.world_size) {
        if (wake_.fd() < 0) {
            throw meeting_error(fmt::format("eventfd failed: {}", error_text(errno)));
        }
        thread_ = std::thread([this] { serve(); });
    }
    ~Server() {
        const std::uint64_t one = 1;
        if (write(wake_.fd(), &one, sizeof one) == sizeof one) {
            thread_.join();
        } else {
            thread_.detach();  // cannot happen to an eventfd that nobody else writes to
        }
    }

    // '1', or '0' where the key was there already, or '2' where no more is taken.
    char set(const std::string& key, const std::string& value) {
        const std::lock_guard lock(mutex_);
        if (values_.contains(key)) {
            return '0';
        }
        const std::size_t bytes = key.size() + value.size() + kOverhead;
        if (key.size() > limits_.key || value.size() > limits_.value ||
            held_ + bytes > limits_.all) {
            return '2';
        }
        held_ += bytes;
        values_.emplace(key, value);
        return '1';
    }
    std::optional<std::string> find(const std::string& key) {
        const std::lock_guard lock(mutex_);
        if (key == kSilentKey) {
            return silent();
        }
        const auto entry = values_.find(key);
        return entry == values_.end() ? std::nullopt : std::optional(entry->second);
    }

 private:
    struct Client {
        Socket socket;
        std::string address;
        std::string unsent;  // nothing more is read until it has been taken
        bool greeted = false;
        std::string received{};
        std::string name{};  // "3 on b", once it has come as this rank
    };
    static constexpr std::size_t kOverhead = 64;  // of a key and its value in memory

    // The ranks that were heard of a while ago only, in words. Needs the mutex.
    std::string silent() const {
        std::string text;
        for (const auto& [name, heard] : heard_) {
            if (Clock::now() - heard > kSilentTime && !is_started(name)) {
                text += fmt::format(
                    "{}rank {} has been silent for {:.0f} s: stopped, or its host "
                    "or network is gone",
                    text.empty() ? "" : "; ", name, seconds_since(heard));
            }
        }
        return text;
    }
    bool is_started(const std::string& name) const {
        return values_.contains(kStartedKey + name.substr(0, name.find(' ')));
    }
    // Its end during the start is the start's, but not a stranger's.
    void gone(const Client& client) {
        if (client.name.empty() && !client.greeted) {
            warn(client);
        }
        const std::lock_guard lock(mutex_);
        if (!client.name.empty() && !is_started(client.name)) {
            values_.emplace(kFailedKey,
                            fmt::format("rank {} has ended during the start", client.name));
        }
        heard_.erase(client.name);
    }
    void warn(const Client& client) {
        if (warnings_++ < kMostWarnings) {
            fmt::print(stderr,
                       "gyre: rank 0 has dropped a connection from {}, which {}; the start goes "
                       "on{}\n",
                       client.address, client.received.empty() ? "said nothing" : "is not gyre's",
                       warnings_ == kMostWarnings ? " (others are dropped in silence)" : "");
        }
    }
    // Closes the oldest of too many connections that belong to no rank.
    void limit_strangers(std::vector<Client>& clients) {
        const auto stranger = [](const Client& client) { return client.name.empty(); };
        if (static_cast<std::size_t>(std::count_if(clients.begin(), clients.end(), stranger)) >
            kMostStrangers) {
            const auto oldest = std::find_if(clients.begin(), clients.end(), stranger);
            if (!oldest->greeted) {
                warn(*oldest);
            }
            clients.erase(oldest);
        }
    }

    void serve() {
        std::vector<Client> clients;
        for (;;) {
            std::vector<pollfd> waits = {{wake_.fd(), POLLIN, 0}, {listener_.fd(), POLLIN, 0}};
            for (const Client& client : clients) {
                const short event = client.unsent.empty() ? POLLIN : POLLOUT;
                waits.push_back({client.socket.fd(), event, 0});
            }
            if (poll(waits.data(), waits.size(), -1) < 0 && errno != EINTR) {
                return;  // the others will miss rank 0's answers, and say so
            }
            if (waits[0].revents != 0) {
                return;
            }
            std::vector<Client> kept;
            for (std::size_t i = 0; i < clients.size(); ++i) {
                if (waits[i + 2].revents == 0 || answer(clients[i])) {
                    kept.push_back(std::move(clients[i]));
                } else {
                    gone(clients[i]);
                }
            }
            clients = std::move(kept);
            if (waits[1].revents != 0) {
                take_in(clients);
            }
        }
    }

    void take_in(std::vector<Client>& clients) {
        sockaddr_storage from{};
        auto* const address = reinterpret_cast<sockaddr*>(&from);
        socklen_t length = sizeof from;
        Socket socket(accept4(listener_.fd(), address, &length, SOCK_CLOEXEC | SOCK_NONBLOCK));
        if (socket.fd() >= 0) {
            socket.set_timeouts(kAnswerTime);
            clients.push_back({.socket = std::move(socket),
                               .address = numeric(address, length).text(),
                               .unsent = std::string(kGreeting) + frame(job_id_)});
            limit_strangers(clients);
        }
    }

    // Sends as much as the client takes now. Returns false if the client has gone.
    static bool send_on(Client& client) {
        const ssize_t sent =
            send(client.socket.fd(), client.unsent.data(), client.unsent.size(), MSG_NOSIGNAL);
        client.unsent.erase(0, sent > 0 ? static_cast<std::size_t>(sent) : 0);
        return sent >= 0 || errno == EAGAIN || errno == EINTR;
    }

    // False where the client is gone or is no gyre.
    bool answer(Client& client) {
        if (client.unsent.empty() && !receive_from(client)) {
            return false;
        }
        while (send_on(client)) {
            if (!client.unsent.empty()) {
                return true;
            }
            std::uint32_t length = 0;
            const std::string& received = client.received;
            if (!client.greeted || received.size() < sizeof length) {
                return true;
            }
            std::memcpy(&length, received.data(), sizeof length);
            length = ntohl(length);
            // A longer value is refused by its rank already.
            if (length > limits_.key + limits_.value + 2) {
                return false;
            }
            if (received.size() < sizeof length + length) {
                return true;
            }
            client.unsent = frame(handle(client, received.substr(sizeof length, length)));
            client.received.erase(0, sizeof length + length);
        }
        return false;
    }
    // Receives what has arrived. False if the client has gone or does not begin as gyre does.
    static bool receive_from(Client& client) {
        std::array<char, 1 << 16> buffer;
        const ssize_t bytes = recv(client.socket.fd(), buffer.data(), buffer.size(), 0);
        if (bytes <= 0) {
            return bytes < 0 && (errno == EAGAIN || errno == EINTR);
        }
        std::string& received = client.received;
        received.append(buffer.data(), static_cast<std::size_t>(bytes));
        if (!client.greeted) {
            const auto shown = std::string_view(received).substr(0, kGreeting.size());
            if (shown != kGreeting.substr(0, shown.size())) {
                return false;
            }
            if (shown.size() == kGreeting.size()) {
                received.erase(0, kGreeting.size());
                client.greeted = true;
            }
        }
        return true;
    }

    // "F" and a key, or "S", a key, a zero and a value; answered by "1" (and the value) or "0", or
    // "2": no more is taken. Who sets "rank/3" comes as rank 3; the fourth line of it is its host.
    std::string handle(Client& client, const std::string& request) {
        const std::size_t zero = request.find('\0');
        if (request.starts_with('S') && zero != std::string::npos) {
            const std::string key = request.substr(1, zero - 1), value = request.substr(zero + 1);
            const char result = set(key, value);
            if (result == '1' && client.name.empty() && key.starts_with("rank/")) {
                std::istringstream lines(value);
                std::string host;
                for (int line = 0; line < 4; ++line) {
                    std::getline(lines, host);
                }
                client.name = printable(fmt::format("{} on {}", key.substr(5), host));
            }
            note(client);
            return {result};
        }
        note(client);
        if (request.starts_with('F')) {
            const auto value = find(request.substr(1));
            return value ? "1" + *value : "0";
        }
        return "0";
    }

    void note(const Client& client) {
        if (!client.name.empty()) {
            const std::lock_guard lock(mutex_);
            heard_[client.name] = Clock::now();
        }
    }

    Socket listener_, wake_;
    int warnings_ = 0;
    const std::string job_id_;
    const StoreLimits limits_;
    std::mutex mutex_;  // guards what follows
    std::map<std::string, std::string> values_;
    std::size_t held_ = 0;
    std::map<std::string, Clock::time_point> heard_;  // by name
    std::thread thread_;
};

class TcpStore final : public Store {
 public:
    TcpStore(const StartUp& start_up, double timeout_seconds)
        : start_up_(start_up), limits_(start_up.world_size) {
        deadline = deadline_in(timeout_seconds);
        address_ = start_up.host;
        port_ = std::to_string(start_up.ports.front());
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
    void listen();
    void connect();
    // Empty where a job of this id answers; otherwise what is wrong. `fatal`: retrying is no use.
    std::string try_connect(int port, bool& fatal);

    std::string ask(const std::string& request) {
        const std::lock_guard lock(mutex_);
        const auto begin = Clock::now();
        // Rank 0 may be busy, or stopped for a while.
        connection_.set_timeouts(time_until(deadline + kLateTime, kAnswerTime));
        if (lost_.empty() && connection_.send_all(frame(request))) {
            if (auto reply = connection_.receive_frame(limits_.value + 1)) {
                return *reply;
            }
        }
        if (lost_.empty()) {
            const bool ended = errno == 0 || errno == ECONNRESET || errno == EPIPE;
            const bool late = errno == EAGAIN || errno == EWOULDBLOCK;
            lost_ = late ? fmt::format(
                               "rank 0 at {} has not answered for {:.0f} s during the start: "
                               "stopped, or its host or network is gone",
                               where(), seconds_since(begin))
                         : fmt::format(
                               "rank 0 at {} closed the connection during the start ({}); "
                               "see its message",
                               where(), ended ? "its process has ended" : error_text(errno));
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
    std::unique_ptr<Server> server_;  // on rank 0
    Socket connection_;               // on the others
};

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
                    taken =
                        fmt::format("rank 0 cannot listen on {}: {}; {}", where(),
                                    reason.empty() ? "a gyre job already does" : reason, remedy());
                    break;
                }
                if (taken.empty()) {
                    taken = fmt::format(
                        "rank 0 cannot listen on {}: {}; give an address of this "
                        "host ({}), where rank 0 runs",
                        numeric(at->ai_addr, at->ai_addrlen).text(), error_text(error),
                        host_name());
                }
                continue;
            }
            const Numeric name = numeric(at->ai_addr, at->ai_addrlen);
            address_ = name.address;
            port_ = name.port;
            server_ = std::make_unique<Server>(std::move(listener), start_up_);
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
        std::string greeting(kGreeting.size(), '\0');
        errno = 0;
        const bool greeted = socket.send_all(kGreeting) &&
                             socket.receive_all(greeting.data(), greeting.size()) &&
                             greeting == kGreeting;
        const auto job = greeted ? socket.receive_frame(kMostJobId) : std::nullopt;
        if (!job && (errno == EAGAIN || errno == EWOULDBLOCK)) {
            trouble = fmt::format(
                "what listens at {} has not answered for {:.2g} s: it is stopped, busy, or not "
                "gyre",
                name, std::chrono::duration<double>(answer_time).count());
            continue;
        }
        if (!job) {
            trouble = fmt::format("what listens there is not gyre (another program uses {})", name);
            fatal = true;
            continue;
        }
        if (*job != start_up_.job_id) {
            trouble = fmt::format("another gyre job uses {} (its job id is '{}', this one's '{}')",
                                  name, printable(*job), printable(start_up_.job_id));
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
                throw meeting_error(
                    fmt::format("rank {} cannot join at {}: {}; choose another "
                                "port, or `job-id` for jobs on one port",
                                start_up_.rank, where(), trouble));
            }
        }
        if (Clock::now() + kConnectInterval > deadline) {
            throw meeting_error(fmt::format(
                "rank {} on {} has not found rank 0 at {} within `init-timeout`: {}; missing: "
                "rank 0 (the others meet there). Start rank 0 with the same `init-method`, on the "
                "host of that address, and check that no firewall closes the port",
                start_up_.rank, host_name(), where(), trouble));
        }
        std::this_thread::sleep_for(kConnectInterval);
    }
}

}  // namespace

std::unique_ptr<Store> make_tcp_store(const StartUp& start_up, double timeout_seconds) {
    return std::make_unique<TcpStore>(start_up, timeout_seconds);
}

}  // namespace gyre::comm
