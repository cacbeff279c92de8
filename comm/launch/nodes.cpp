#include "comm/launch/nodes.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <numeric>
#include <optional>
#include <random>
#include <sstream>
#include <thread>
#include <utility>

#include "base/clock.hpp"
#include "comm/launch/meeting_error.hpp"
#include "comm/launch/socket.hpp"
#include "comm/launch/tcp_address.hpp"

namespace gyre::comm {
namespace {

constexpr double kJoinSeconds = 600.0;   // until enough hosts must have come; torchrun's
constexpr double kAnswerSeconds = 10.0;  // of host 0
constexpr double kEndSeconds = 10.0;     // that host 0 stays for the others to read its last word
constexpr double kLookSeconds = 0.02;    // between two looks at the store
constexpr double kReconnectSeconds = 1;  // of an attempt, and between two
constexpr const char* kEnd = "end";

// A port at which rank 0 can listen now.
int port_of_ranks(const NodesSpec& spec) {
    const auto addresses = resolve(spec.master_addr, 0);
    int error = 0;
    for (const addrinfo* at = addresses->first; at != nullptr; at = at->ai_next) {
        const Socket probe(::socket(at->ai_family, at->ai_socktype | SOCK_CLOEXEC, 0));
        sockaddr_storage name{};
        socklen_t length = sizeof name;
        auto* const address = reinterpret_cast<sockaddr*>(&name);
        if (bind(probe.fd(), at->ai_addr, at->ai_addrlen) == 0 &&
            getsockname(probe.fd(), address, &length) == 0) {
            return std::atoi(numeric(address, length).port.c_str());
        }
        error = errno;
    }
    throw meeting_error(fmt::format("gyre launch: no port is free on {}, where the ranks meet: {}",
                                    spec.master_addr, error_text(error)));
}

StartUp start_up_of(const NodesSpec& spec) {
    StartUp start_up;
    start_up.method = StartUp::Method::tcp;
    start_up.words = {.member = "host",
                      .time_limit = fmt::format("{:.0f} s", kJoinSeconds),
                      .flags = "`master-addr` and `master-port`",
                      .apart =
                          "give all launchers the same `nnodes`, or another job another "
                          "`master-port`"};
    start_up.rank = spec.node;
    start_up.world_size = spec.most;
    start_up.host = spec.master_addr;
    start_up.ports = {spec.master_port};
    start_up.job_id = fmt::format("gyre launch, nnodes {}:{}", spec.least, spec.most);
    start_up.secret = Secret::of_environment();
    start_up.insecure = spec.insecure;
    return start_up;
}

}  // namespace

NodeMeeting::NodeMeeting(const NodesSpec& spec, int ranks)
    : spec_(spec),
      ranks_(ranks),
      store_(make_tcp_store(start_up_of(spec), kJoinSeconds)),
      members_(static_cast<std::size_t>(spec.most)) {
    std::iota(members_.begin(), members_.end(), 0);
    std::random_device random;
    mine_ = fmt::format("{} {:08x}{:08x}", ranks, random(), random());
}

std::string NodeMeeting::key(const char* name, int generation) const {
    return fmt::format("{}/{}", generation, name);
}
std::string NodeMeeting::key(const char* name, int generation, int node) const {
    return fmt::format("{}/{}/{}", generation, name, node);
}

void NodeMeeting::require_store() const {
    if (!store_) {
        throw meeting_error("gyre launch: host 0 is lost");
    }
}

std::optional<std::string> NodeMeeting::find(const std::string& key) {
    require_store();
    store_->deadline = deadline_in(kAnswerSeconds);
    return store_->find(key);
}
bool NodeMeeting::set(const std::string& key, const std::string& value) {
    require_store();
    store_->deadline = deadline_in(kAnswerSeconds);
    return store_->set(key, value);
}

bool NodeMeeting::is_member(int node) const {
    return std::find(members_.begin(), members_.end(), node) != members_.end();
}

// Finds the next generation, and says in it that this host is there, unless it has said so before.
void NodeMeeting::arrive() {
    while (find(key("members", generation_))) {
        ++generation_;
    }
    const std::string place = key("node", generation_, spec_.node);
    if (!set(place, mine_) && find(place) != mine_) {
        throw usage_error(fmt::format(
            "gyre launch: host {} is already at {}: another gyre launch has the same `node-rank`, "
            "or this is another job's port",
            spec_.node, store_->where()));
    }
}

std::optional<NodePlace> NodeMeeting::meet(const std::function<bool(double)>& asked) {
    for (auto heard = Clock::now();; store_.reset()) {
        try {
            if (!store_) {  // it may be that of a new launcher
                store_ = make_tcp_store(start_up_of(spec_), kReconnectSeconds);
                generation_ = 0;
                heard = Clock::now();
            }
            return meet_there(asked);
        } catch (const Error& error) {
            const bool other_may_come = spec_.node != 0 && spec_.least < spec_.most &&
                                        error.code() == ExitCode::communication;
            if (!other_may_come || seconds_since(heard) > kJoinSeconds) {
                throw;
            }
            if (store_) {
                fmt::print(stderr, "gyre launch: waiting for host 0 for up to {:.0f} s: {}\n",
                           kJoinSeconds, error.what());
            }
        }
        if (asked(kReconnectSeconds)) {
            return std::nullopt;
        }
    }
}

std::optional<NodePlace> NodeMeeting::meet_there(const std::function<bool(double)>& asked) {
    arrive();
    if (spec_.node == 0 && !gather(asked)) {
        end();
        return std::nullopt;
    }
    for (;;) {
        if (const auto members = find(key("members", generation_))) {
            if (auto place = place_in(*members)) {
                return place;
            }
            arrive();  // in the next one, as this one has begun at that moment
        } else if (find(kEnd) || asked(kLookSeconds)) {
            end();
            return std::nullopt;
        }
    }
}

// On host 0: waits for the others, and begins the generation. False if it is asked to end.
bool NodeMeeting::gather(const std::function<bool(double)>& asked) {
    const auto started = Clock::now();
    auto lacked = started;  // when there were too few hosts last
    for (;;) {
        std::vector<std::pair<int, int>> present;  // number, ranks
        std::vector<int> missing, left;            // of the members
        for (int node = 0; node < spec_.most; ++node) {
            if (const auto ranks = find(key("node", generation_, node))) {
                present.emplace_back(node, std::max(1, std::atoi(ranks->c_str())));
            } else if (is_member(node)) {
                missing.push_back(node);
                if (find(key("left", generation_ - 1, node)) ||
                    find(key("left", generation_, node))) {
                    left.push_back(node);
                }
            }
        }
        if (static_cast<int>(present.size()) >= spec_.least) {
            if (missing == left || seconds_since(lacked) > spec_.rejoin_timeout) {
                begin(present, missing);
                return true;
            }
        } else {
            lacked = Clock::now();
            if (seconds_since(started) > kJoinSeconds) {
                throw meeting_error(fmt::format(
                    "gyre launch: {} of at least {} hosts have come to {} within {:.0f} s; "
                    "missing: {}. Start gyre launch there with the same `master-addr` and "
                    "`master-port`",
                    present.size(), spec_.least, store_->where(), kJoinSeconds,
                    fmt::join(missing, ", ")));
            }
            if (!left.empty() && spec_.least == spec_.most) {
                throw meeting_error(fmt::format(
                    "gyre launch: the job needs all {} hosts, and the launcher of host {} has "
                    "ended; see its message",
                    spec_.most, fmt::join(left, ", ")));
            }
        }
        if (asked(kLookSeconds)) {
            return false;
        }
    }
}

void NodeMeeting::begin(const std::vector<std::pair<int, int>>& present,
                        const std::vector<int>& missing) {
    int world_size = 0;
    std::vector<int> nodes;
    std::string members;
    for (const auto& [node, ranks] : present) {
        world_size += ranks;
        nodes.push_back(node);
        members += fmt::format(" {} {}", node, ranks);
    }
    const bool changes = nodes != members_;
    if (spec_.least < spec_.most && (changes || generation_ == 0)) {
        fmt::print(
            stderr, "gyre launch: {} of {} hosts train, with {} rank{}: host {}{}\n", nodes.size(),
            spec_.most, world_size, world_size == 1 ? "" : "s", fmt::join(nodes, ", "),
            missing.empty() ? "" : fmt::format("; without host {}", fmt::join(missing, ", ")));
    }
    const int most_ranks =
        spec_.least < spec_.most ? std::max(world_size, spec_.most * ranks_) : world_size;
    set(key("members", generation_),
        fmt::format("{} {}{}", port_of_ranks(spec_), most_ranks, members));
}

// This host's place; nothing if it is not in the generation.
std::optional<NodePlace> NodeMeeting::place_in(const std::string& members) {
    std::istringstream in(members);
    NodePlace place{.world_size = 0, .nodes = 0};
    in >> place.master_port >> place.most_ranks;
    members_.clear();
    for (int node = 0, ranks = 0; in >> node >> ranks; ++place.nodes) {
        if (node == spec_.node) {
            place.first_rank = place.world_size;
            place.number = place.nodes;
        }
        place.world_size += ranks;
        members_.push_back(node);
    }
    awaited_ = false;
    return is_member(spec_.node) ? std::optional(place) : std::nullopt;
}

bool NodeMeeting::is_awaited() {
    if (spec_.node != 0 || awaited_) {
        return false;
    }
    for (int node = 0; node < spec_.most && !awaited_; ++node) {
        awaited_ = !is_member(node) && find(key("node", generation_ + 1, node)).has_value();
    }
    if (awaited_) {
        set(key("regroup", generation_), "");
    }
    return awaited_;
}

void NodeMeeting::leave() {
    try {
        if (spec_.node != 0 && spec_.least < spec_.most) {
            set(key("left", generation_, spec_.node), "");
            set(key("regroup", generation_), "");
        }
    } catch (const Error&) {
        // Host 0 is gone, and with it the job.
    }
}

bool NodeMeeting::regroups() {
    try {
        return find(key("regroup", generation_)).has_value();
    } catch (const Error&) {
        return false;
    }
}

void NodeMeeting::end() {
    try {
        if (spec_.node != 0) {
            set(key("left", generation_, spec_.node), "");
            return;
        }
        set(kEnd, "");
        const bool begun = find(key("members", generation_)).has_value();
        const auto heard = [&](int node) {
            return node == 0 || find(key("left", generation_, node)) ||
                   find(key("node", generation_ + 1, node)) ||
                   find(key("left", generation_ + 1, node)) ||
                   (!begun && !find(key("node", generation_, node)));
        };
        const auto deadline = deadline_in(kEndSeconds);
        while (!std::all_of(members_.begin(), members_.end(), heard) && Clock::now() < deadline) {
            std::this_thread::sleep_for(std::chrono::duration<double>(kLookSeconds));
        }
    } catch (const Error&) {
        // Host 0 has ended before.
    }
}

}  // namespace gyre::comm
