#include "comm/watch/peers.hpp"

#include <fmt/format.h>
#include <poll.h>

#include <algorithm>
#include <utility>

#include "base/host_name.hpp"
#include "base/printable.hpp"
#include "comm/launch/tcp_address.hpp"

namespace gyre::comm {
namespace {

constexpr double kConnectSeconds = 5.0;  // that rank 0 waits for the others
constexpr int kConnectMilliseconds = 4000;
constexpr std::size_t kMostSilent = 64;  // connections beyond the ranks that say nothing
constexpr double kSilentSeconds = 3.0;   // a rank silent for longer counts as not answering

// A rank's first message is sealed alike for all ranks; what follows, for each rank separately.
Seal hello_seal(const Secret& secret, bool root) {
    return {secret, "watchdog", root};
}
Seal rank_seal(const Secret& secret, std::int64_t rank, bool root) {
    return {secret, fmt::format("watchdog of rank {}", rank), root};
}

bool gone(const Status& s) {
    return (s.flags & Status::kClosed) != 0 && (s.flags & Status::kLeaving) == 0;
}
bool at_fault(const Status& s) {
    return gone(s) && (s.flags & Status::kFailing) == 0;
}
bool silent(const Status& s) {
    return s.silent >= kSilentSeconds;
}
std::string how_absent(const Status& s) {
    return !gone(s) ? fmt::format("silent for {:.0f} s: stopped, or its host or network is gone",
                                  s.silent)
           : at_fault(s) ? "its process has ended"
                         : "it has also given up";
}

}  // namespace

Peers::Peers(Communicator& comm) : rank_(comm.rank()), size_(comm.size()) {
    const std::string host = host_name();
    for (int r = 0; r < size_; ++r) {
        hosts_.push_back(printable(broadcast_string(comm, host, r)));
    }
    table_.resize(static_cast<std::size_t>(size_));
    heard_.resize(table_.size(), Clock::now());
    joined_.resize(table_.size());
    for (int r = 0; r < size_; ++r) {
        table_[static_cast<std::size_t>(r)].rank = r;
    }
    connect(comm);
}

void Peers::connect(Communicator& comm) {
    std::string address;
    std::uint16_t port = 0;
    std::string key(Secret::kBytes,
                    '\0');  // of this job's watchdog, as the communicator carries it
    agree(comm, [&] {
        if (rank_ == 0) {
            const bool one_host = std::all_of(hosts_.begin(), hosts_.end(),
                                              [&](const std::string& h) { return h == hosts_[0]; });
            address = one_host ? "127.0.0.1" : comm.address();
            if (address.empty()) {
                address = listening_address();
            }
            listener_ = listen_at(address, port);
            key = random_bytes(key.size());
        }
    });
    address = broadcast_string(comm, address, 0);
    comm.broadcast(&port, sizeof port, 0);
    comm.broadcast(key.data(), key.size(), 0);
    const Secret secret(key);
    if (rank_ == 0) {
        links_.resize(table_.size());
        accept_all(secret);
    } else {
        links_.resize(1);
        connect_to_root(address, port, secret);
    }
}

void Peers::connect_to_root(const std::string& address, std::uint16_t port, const Secret& secret) {
    Socket socket = port == 0 ? Socket() : connect_to(address, port, kConnectMilliseconds);
    if (socket.open()) {
        const std::int64_t hello = rank_;
        links_[0] = Link(std::move(socket), hello_seal(secret, false));
        links_[0].send(&hello, sizeof hello);
        links_[0].set_seal(rank_seal(secret, rank_, false));
        joined_[0] = true;
        return;
    }
    fmt::print(
        stderr,
        "gyre: rank {} on {}: no connection to rank 0's watchdog on {}, which {}; waits still have "
        "a deadline, but late ranks cannot be named. Name the interface of the network between the "
        "hosts in {}\n",
        rank_, host(), hosts_[0],
        port == 0 ? std::string("has no address to listen at")
                  : fmt::format("listens at {} (port {})", address, port),
        kInterfaceVariable);
}

void Peers::accept_all(const Secret& secret) {
    const auto begin = Clock::now();
    std::vector<Link> strangers;
    int missing = size_ - 1;
    while (missing > 0 && listener_.open() && seconds_since(begin) < kConnectSeconds) {
        pollfd wait{listener_.fd(), POLLIN, 0};
        if (poll(&wait, 1, 10) == 1) {
            strangers.emplace_back(Socket(accept4(listener_.fd(), nullptr, nullptr, SOCK_CLOEXEC)),
                                   hello_seal(secret, true));
        }
        std::erase_if(strangers, [](const Link& link) { return !link.open(); });
        if (strangers.size() > links_.size() + kMostSilent) {  // the oldest has had its time
            strangers.erase(strangers.begin());
        }
        for (Link& link : strangers) {
            std::int64_t rank = 0;
            if (link.open() && link.receive(&rank, sizeof rank)) {
                const auto at = static_cast<std::size_t>(rank);
                if (rank > 0 && rank < size_ && !joined_[at]) {
                    link.set_seal(rank_seal(secret, rank, true));
                    links_[at] = std::exchange(link, Link());
                    joined_[at] = true;
                    --missing;
                }
                link.close();
            } else if (link.foreign() > 0) {
                link.close();
            }
        }
    }
    listener_.close();
}

void Peers::warn_of_foreign() {
    for (const Link& link : links_) {
        if (!warned_ && link.foreign() > 0) {
            warned_ = true;
            fmt::print(
                stderr,
                "gyre: rank {} on {}: the watchdog has dropped a message that no rank of this "
                "job has made now; somebody else writes into its connections\n",
                rank_, host());
        }
    }
}

void Peers::exchange(const Status& own) {
    table_[static_cast<std::size_t>(rank_)] = own;
    heard_[static_cast<std::size_t>(rank_)] = Clock::now();
    if (rank_ == 0) {
        exchange_with_all();
    } else {
        exchange_with_root();
    }
    warn_of_foreign();
}

void Peers::exchange_with_root() {
    const Status own = table_[static_cast<std::size_t>(rank_)];
    links_[0].send(&own, sizeof own);
    std::vector<Status> news(table_.size());
    while (links_[0].receive(news.data(), news.size() * sizeof(Status))) {
        table_ = news;
        const auto chosen = std::find_if(news.begin(), news.end(), [](const Status& s) {
            return (s.flags & Status::kSpeaker) != 0;
        });
        speaker_ = chosen == news.end() ? speaker_ : chosen->rank;
        table_[static_cast<std::size_t>(rank_)] = own;
        heard_[0] = Clock::now();
    }
    table_[0].silent = static_cast<float>(seconds_since(heard_[0]));
    if (joined_[0] && !links_[0].open()) {
        table_[0].flags |= Status::kClosed;
    }
}

void Peers::exchange_with_all() {
    for (std::size_t r = 1; r < table_.size(); ++r) {
        Status news;
        while (links_[r].receive(&news, sizeof news)) {
            table_[r] = news;
            heard_[r] = Clock::now();
        }
        table_[r].silent = static_cast<float>(seconds_since(heard_[r]));
        if (joined_[r] && !links_[r].open()) {
            table_[r].flags |= Status::kClosed;
        }
    }
    for (Status& s : table_) {
        if (speaker_ < 0 && (s.flags & Status::kReporting) != 0) {
            speaker_ = s.rank;
        }
        s.flags |= s.rank == speaker_ ? Status::kSpeaker : 0;
    }
    for (std::size_t r = 1; r < table_.size(); ++r) {
        links_[r].send(table_.data(), table_.size() * sizeof(Status));
    }
}

bool Peers::any_gone() const {
    return std::any_of(table_.begin(), table_.end(), gone);
}

bool Peers::any_at_fault() const {
    return std::any_of(table_.begin(), table_.end(), at_fault);
}

bool Peers::speaks() const {
    if (speaker_ >= 0) {
        return speaker_ == rank_;
    }
    for (const Status& s : table_) {
        if (s.rank == rank_) {
            return true;
        }
        if (s.waiting >= 0.0f && !silent(s) && !gone(s)) {
            return false;
        }
    }
    return true;
}

std::string Peers::absent_ranks() const {
    std::string text, given_up;
    for (const Status& s : table_) {
        if (s.rank == rank_ || (!gone(s) && !silent(s))) {
            continue;
        }
        std::string& list = gone(s) && !at_fault(s) ? given_up : text;
        list += fmt::format("{}{} ({})", list.empty() ? "gone: " : ", ", name(s), how_absent(s));
    }
    return !text.empty()       ? text
           : !given_up.empty() ? given_up
                               : "no other rank's process has ended";
}

std::string Peers::late_ranks(std::int64_t number) const {
    std::string late, arrived;
    for (const Status& s : table_) {
        const bool absent = gone(s) || silent(s);
        if (s.started > number) {
            arrived += fmt::format("{}{}", arrived.empty() ? "" : ", ", s.rank);
            if (!absent) {
                continue;
            }
        }
        late += fmt::format("{}{} ({})", late.empty() ? "" : "; ", name(s),
                            absent ? how_absent(s)
                                   : fmt::format("heard {:.0f} s ago, at collective {}, step {}",
                                                 s.silent, s.started, s.step + 1));
    }
    return fmt::format("arrived: rank{} {}; not answering or not arrived: {}",
                       arrived.find(',') == std::string::npos ? "" : "s",
                       arrived.empty() ? "none" : arrived,
                       late.empty() ? "none: the library is stuck" : late);
}

std::string Peers::name(const Status& s) const {
    return fmt::format("rank {} on {}", s.rank, hosts_[static_cast<std::size_t>(s.rank)]);
}

}  // namespace gyre::comm
