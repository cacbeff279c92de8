#include "comm/launch/tcp_server.hpp"

#include <fmt/format.h>
#include <poll.h>
#include <sys/eventfd.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <sstream>
#include <utility>

#include "base/printable.hpp"
#include "comm/launch/meeting_error.hpp"
#include "comm/launch/tcp_address.hpp"

namespace gyre::comm {
namespace {

using namespace std::chrono_literals;

constexpr auto kTakeTime = 3s;              // for a client to take what it is sent
constexpr auto kSilentTime = 2s;            // after which a rank that starts counts as not heard of
constexpr std::size_t kMostStrangers = 64;  // connections that belong to no rank
constexpr std::size_t kOverhead = 64;       // bytes of a key and its value in memory, besides these
constexpr int kMostWarnings = 8;            // of strangers

std::size_t held_by(const std::string& key, const std::string& value) {
    return key.size() + value.size() + kOverhead;
}

bool is_launcher(const std::string& name) {
    return name.find("/node/") != std::string::npos;
}

}  // namespace

TcpServer::TcpServer(Socket listener, const StartUp& start_up)
    : listener_(std::move(listener)),
      wake_(eventfd(0, EFD_CLOEXEC)),
      member_(start_up.words.member),
      job_id_(start_up.job_id),
      secret_(start_up.secret),
      limits_(start_up.world_size) {
    if (wake_.fd() < 0) {
        throw meeting_error(fmt::format("eventfd failed: {}", error_text(errno)));
    }
    thread_ = std::thread([this] { serve(); });
}

TcpServer::~TcpServer() {
    const std::uint64_t one = 1;
    if (write(wake_.fd(), &one, sizeof one) == sizeof one) {
        thread_.join();
    } else {
        thread_.detach();  // cannot happen to an eventfd that nobody else writes to
    }
    if (dropped_ > kMostWarnings) {
        fmt::print(stderr, "gyre: {} 0 has dropped {} connections of strangers in all\n", member_,
                   dropped_);
    }
}

char TcpServer::set(const std::string& key, const std::string& value) {
    const std::lock_guard lock(mutex_);
    if (values_.contains(key)) {
        return '0';
    }
    const std::size_t bytes = held_by(key, value);
    if (key.size() > limits_.key || value.size() > limits_.value || held_ + bytes > limits_.all) {
        return '2';
    }
    held_ += bytes;
    values_.emplace(key, value);
    return '1';
}

std::optional<std::string> TcpServer::find(const std::string& key) {
    const std::lock_guard lock(mutex_);
    if (key == kSilentKey) {
        return silent();
    }
    const auto entry = values_.find(key);
    return entry == values_.end() ? std::nullopt : std::optional(entry->second);
}

// The ranks that were heard of a while ago only, in words. Needs the mutex.
std::string TcpServer::silent() const {
    std::string text;
    for (const auto& [name, heard] : heard_) {
        if (Clock::now() - heard > kSilentTime && !is_started(name)) {
            text += fmt::format(
                "{}rank {} has been silent for {:.0f} s: stopped, or its host or network is gone",
                text.empty() ? "" : "; ", name, seconds_since(heard));
        }
    }
    return text;
}

bool TcpServer::is_started(const std::string& name) const {
    return values_.contains(kStartedKey + name.substr(0, name.find(' ')));
}

// A rank's end during the start is the start's, but not a stranger's. A launcher is no longer
// there, unless it has come again before its old connection has ended.
void TcpServer::gone(const Client& client, const std::vector<Client>& others) {
    if (client.name.empty() && (!client.seal || client.forged)) {
        warn(client);
    }
    const std::lock_guard lock(mutex_);
    if (is_launcher(client.name)) {
        const auto same = [&client](const Client& other) { return other.name == client.name; };
        const auto entry = values_.find(client.name);
        if (entry != values_.end() && std::none_of(others.begin(), others.end(), same)) {
            held_ -= held_by(entry->first, entry->second);
            values_.erase(entry);
        }
    } else if (!client.name.empty() && !is_started(client.name)) {
        values_.emplace(kFailedKey, fmt::format("rank {} has ended during the start", client.name));
    }
    heard_.erase(client.name);
}

void TcpServer::warn(const Client& client) {
    if (++dropped_ <= kMostWarnings) {
        fmt::print(stderr,
                   "gyre: {} 0 has dropped a connection from {}, which {}; the start continues{}\n",
                   member_, client.address,
                   client.forged             ? "does not know this job's secret"
                   : client.received.empty() ? "said nothing"
                                             : "is not gyre's",
                   dropped_ == kMostWarnings ? " (others are dropped in silence)" : "");
    }
}

// Closes the oldest of too many connections that belong to no rank.
void TcpServer::limit_strangers(std::vector<Client>& clients) {
    const auto stranger = [](const Client& client) { return client.name.empty(); };
    if (static_cast<std::size_t>(std::count_if(clients.begin(), clients.end(), stranger)) >
        kMostStrangers) {
        const auto oldest = std::find_if(clients.begin(), clients.end(), stranger);
        if (!oldest->seal) {
            warn(*oldest);
        }
        clients.erase(oldest);
    }
}

void TcpServer::serve() {
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
        std::vector<Client> kept, lost;
        for (std::size_t i = 0; i < clients.size(); ++i) {
            const bool stays = waits[i + 2].revents == 0 || answer(clients[i]);
            (stays ? kept : lost).push_back(std::move(clients[i]));
        }
        clients = std::move(kept);
        for (const Client& client : lost) {
            gone(client, clients);
        }
        if (waits[1].revents != 0) {
            take_in(clients);
        }
    }
}

void TcpServer::take_in(std::vector<Client>& clients) {
    sockaddr_storage from{};
    auto* const address = reinterpret_cast<sockaddr*>(&from);
    socklen_t length = sizeof from;
    Socket socket(accept4(listener_.fd(), address, &length, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (socket.fd() >= 0) {
        socket.set_timeouts(kTakeTime);
        const std::string nonce = random_bytes(kNonceBytes);
        clients.push_back({.socket = std::move(socket),
                           .address = numeric(address, length).text(),
                           .nonce = nonce,
                           .unsent = std::string(kGreeting) + nonce});
        limit_strangers(clients);
    }
}

bool TcpServer::answer(Client& client) {
    // Sends as much as the client takes now. Returns false if the client has gone.
    const auto send_on = [&client] {
        const ssize_t sent =
            send(client.socket.fd(), client.unsent.data(), client.unsent.size(), MSG_NOSIGNAL);
        client.unsent.erase(0, sent > 0 ? static_cast<std::size_t>(sent) : 0);
        return sent >= 0 || errno == EAGAIN || errno == EINTR;
    };
    if (client.unsent.empty() && !receive_from(client)) {
        return false;
    }
    while (send_on()) {
        if (!client.unsent.empty()) {
            return true;
        }
        std::uint32_t length = 0;
        const std::string& received = client.received;
        if (!client.seal || received.size() < sizeof length) {
            return true;
        }
        std::memcpy(&length, received.data(), sizeof length);
        length = ntohl(length);
        // A longer value is refused by its rank already.
        if (length > limits_.key + limits_.value + 2 + Seal::kBytes) {
            return false;
        }
        if (received.size() < sizeof length + length) {
            return true;
        }
        const auto request =
            client.seal->open(std::string_view(received).substr(sizeof length, length));
        if (!request) {
            client.forged = true;
            return false;
        }
        client.unsent = frame(client.seal->close(handle(client, *request)));
        client.received.erase(0, sizeof length + length);
    }
    return false;
}

// Receives what has arrived. Returns false if the client has gone or does not begin as gyre does.
bool TcpServer::receive_from(Client& client) {
    std::array<char, 1 << 16> buffer;
    const ssize_t bytes = recv(client.socket.fd(), buffer.data(), buffer.size(), 0);
    if (bytes <= 0) {
        return bytes < 0 && (errno == EAGAIN || errno == EINTR);
    }
    std::string& received = client.received;
    received.append(buffer.data(), static_cast<std::size_t>(bytes));
    if (!client.seal) {
        const auto shown = std::string_view(received).substr(0, kGreeting.size());
        if (shown != kGreeting.substr(0, shown.size())) {
            return false;
        }
        if (received.size() >= kGreeting.size() + kNonceBytes) {
            client.seal = store_seal(secret_, client.nonce,
                                     received.substr(kGreeting.size(), kNonceBytes), true);
            client.unsent = frame(client.seal->close(job_id_));
            received.erase(0, kGreeting.size() + kNonceBytes);
        }
    }
    return true;
}

// "F" and a key, or "S", a key, a zero and a value; answered by "1" (and the value) or "0", or "2":
// no more is taken. Who sets "rank/3" comes as rank 3; the fourth line of it is its host. Who sets
// "0/node/3" is a launcher, whose key stays while it is connected.
std::string TcpServer::handle(Client& client, const std::string& request) {
    const std::size_t zero = request.find('\0');
    if (request.starts_with('S') && zero != std::string::npos) {
        const std::string key = request.substr(1, zero - 1), value = request.substr(zero + 1);
        const char result = set(key, value);
        if (is_launcher(key) && (result == '1' || find(key) == value)) {
            client.name = key;
        } else if (result == '1' && client.name.empty() && key.starts_with("rank/")) {
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

void TcpServer::note(const Client& client) {
    if (!client.name.empty()) {
        const std::lock_guard lock(mutex_);
        heard_[client.name] = Clock::now();
    }
}

}  // namespace gyre::comm
