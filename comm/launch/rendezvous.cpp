// The meeting of the ranks, through a store (tcp_store.cpp, file_store.cpp).
#include "comm/launch/rendezvous.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <random>
#include <sstream>
#include <thread>

#include "base/clock.hpp"
#include "base/host_name.hpp"
#include "base/printable.hpp"
#include "comm/launch/meeting_error.hpp"

namespace gyre::comm {
namespace {

using namespace std::chrono_literals;

constexpr auto kAskInterval = 10ms;     // for a key that is not there yet
constexpr auto kLinger = 300ms;         // for the others to learn that rank 0 gives up
constexpr std::size_t kMostNamed = 16;  // of the ranks that are missing

// The facts that each rank publishes, line by line.
struct RankFacts {
    std::string version, world_size, job_id, host, machine, process, nonce, time;
    std::string pid_namespace;  // in which the process has its number
    std::string text() const {
        return fmt::format("{}\n{}\n{}\n{}\n{}\n{}\n{}\n{}\n{}\n", version, world_size, job_id,
                           host, machine, process, nonce, time, pid_namespace);
    }
    static RankFacts parse(const std::string& text) {
        RankFacts facts;
        std::istringstream in(text);
        for (std::string* line :
             {&facts.version, &facts.world_size, &facts.job_id, &facts.host, &facts.machine,
              &facts.process, &facts.nonce, &facts.time, &facts.pid_namespace}) {
            std::getline(in, *line);
            *line = printable(*line);
        }
        return facts;
    }
    std::string who() const {
        return fmt::format("process {} on {}, started {}", process, host, time);
    }
    // The number of that process if this one can ask about it; 0: it cannot.
    int process_seen_by(const RankFacts& other) const {
        const bool seen = machine == other.machine && pid_namespace == other.pid_namespace &&
                          !pid_namespace.empty();
        return seen ? std::max(0, std::atoi(process.c_str())) : 0;
    }
};

RankFacts own_facts(const StartUp& start_up) {
    std::string boot;
    std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
    std::random_device random;
    std::array<char, 32> time{};
    const std::time_t now = std::time(nullptr);
    std::tm calendar{};
    localtime_r(&now, &calendar);
    std::strftime(time.data(), time.size(), "%Y-%m-%d %H:%M:%S", &calendar);
    std::error_code ignored;
    return {GYRE_VERSION,
            std::to_string(start_up.world_size),
            printable(start_up.job_id),
            host_name(),
            host_name() + "/" + boot,
            std::to_string(getpid()),
            fmt::format("{:08x}{:08x}", random(), random()),
            time.data(),
            std::filesystem::read_symlink("/proc/self/ns/pid", ignored).string()};
}

std::string rank_key(int rank) {
    return fmt::format("rank/{}", rank);
}

// Refuses what does not belong to rank 0's job.
void require_same_job(const Store& store, const RankFacts& mine, const RankFacts& root, int rank) {
    const auto require = [&](const char* what, const std::string& here, const std::string& there) {
        if (here != there) {
            throw meeting_error(fmt::format(
                "rank {} was started with {} '{}', but rank 0 at {} with '{}' ({}): start all "
                "ranks alike; if that is another job, {}",
                rank, what, here, store.where(), there, root.who(), store.remedy()));
        }
    };
    require("job id", mine.job_id, root.job_id);
    require("world size", mine.world_size, root.world_size);
    require("gyre version", mine.version, root.version);
}

// Waits for a key of the meeting; at the deadline, says who has not come. root_process: rank 0's,
// if it is known and can be asked about, or 0.
std::string await(Store& store, const std::string& key, int world_size, int root_process) {
    for (;;) {
        if (auto value = store.find(key)) {
            return *value;
        }
        if (const auto failure = store.find(kFailedKey)) {
            throw meeting_error(printable(*failure));
        }
        const bool root_gone =
            root_process != 0 && state_of_process(root_process) == ProcessState::gone;
        if (Clock::now() > store.deadline || root_gone) {
            std::vector<int> missing;
            std::string refused;
            int rank = 0;
            for (; rank < world_size && missing.size() < kMostNamed; ++rank) {
                if (!store.find(rank_key(rank))) {
                    missing.push_back(rank);
                    if (const auto text = store.find(fmt::format("refused/{}", rank))) {
                        refused += fmt::format("; refused: {}", printable(*text));
                    }
                }
            }
            if (missing.empty() || root_gone) {
                throw meeting_error(fmt::format(
                    "rank 0 at {} has stopped answering{}; {}", store.where(),
                    root_gone ? fmt::format(": its process {} has ended", root_process) : "",
                    store.remedy()));
            }
            if (missing.front() == 0) {  // the others come only after it
                missing = {0};
            }
            const bool more = missing.front() != 0 && rank < world_size;
            throw meeting_error(fmt::format(
                "{}{} of {} ranks did not come to {} within `init-timeout`; missing: rank{} {}{}. "
                "Start them with the same `init-method` and `world-size`, check that they reach "
                "that address, or raise `init-timeout`{}",
                more ? "at least " : "", missing.size(), world_size, store.where(),
                missing.size() == 1 ? "" : "s", fmt::join(missing, ", "),
                more ? ", perhaps others" : "", refused));
        }
        std::this_thread::sleep_for(kAskInterval);
    }
}

}  // namespace

std::string Store::get(const std::string& key, const std::string& who) {
    for (;;) {
        if (auto value = find(key)) {
            return *value;
        }
        if (const auto failure = find(kFailedKey)) {
            throw meeting_error(printable(*failure));
        }
        if (Clock::now() > deadline) {
            throw meeting_error(fmt::format(
                "{} has come to {}, but not said within `init-timeout` where it can be reached",
                who, where()));
        }
        std::this_thread::sleep_for(kAskInterval);
    }
}

void give_up_start(Store& store, int rank, const std::string& reason) {
    try {
        store.set(kFailedKey,
                  fmt::format("rank {} on {} gave up the start: {}", rank, host_name(), reason));
    } catch (const Error&) {
        // The others will meet their own deadline.
    }
    if (rank == 0) {
        std::this_thread::sleep_for(kLinger);
    }
}

Place meet(Store& store, const StartUp& start_up) {
    const int rank = start_up.rank, size = start_up.world_size;
    const RankFacts mine = own_facts(start_up);
    bool joined = false;
    int root_process = 0;
    std::vector<RankFacts> all;
    try {
        if (rank == 0) {
            joined = store.set(rank_key(0), mine.text());
        } else {
            const RankFacts root = RankFacts::parse(await(store, rank_key(0), size, 0));
            try {
                require_same_job(store, mine, root, rank);
            } catch (const Error& error) {
                store.set(fmt::format("refused/{}", rank), error.what());
                throw;
            }
            root_process = root.process_seen_by(mine);
            joined = store.set(rank_key(rank), mine.text());
        }
        if (!joined) {
            const RankFacts first = RankFacts::parse(store.find(rank_key(rank)).value_or(""));
            throw meeting_error(fmt::format(
                "rank {} is already at {} ({}): another rank has the same `rank`, or this is "
                "another or an earlier job's; {}",
                rank, store.where(), first.who(), store.remedy()));
        }
        std::string nonces;
        for (int other = 0; other < size; ++other) {
            all.push_back(RankFacts::parse(await(store, rank_key(other), size, root_process)));
            nonces += all.back().nonce + ' ';
        }
        // Whoever is there must be there now: rank 0 answers with what each of them has just made
        // up, which what an earlier job left behind cannot.
        if (rank == 0) {
            store.set("all", nonces);
        } else if (await(store, "all", size, root_process) != nonces) {
            throw meeting_error(fmt::format("what is at {} is another or an earlier job's; {}",
                                            store.where(), store.remedy()));
        }
    } catch (const Error& error) {
        if (joined) {
            give_up_start(store, rank, error.what());
        }
        throw;
    }
    Place place;
    place.host = mine.host;
    place.token = start_up.secret.known() ? code_text(start_up.secret, "token " + all.front().nonce)
                                          : all.front().nonce;
    place.machine = mine.machine;
    for (int other = 0; other < size; ++other) {
        const RankFacts& facts = all[static_cast<std::size_t>(other)];
        const bool here = facts.machine == mine.machine;
        place.peers.push_back({fmt::format("rank {} on {}", other, facts.host),
                               other == rank ? 0 : facts.process_seen_by(mine)});
        place.one_host = place.one_host && here;
        place.local_rank += here && other < rank ? 1 : 0;
        place.local_size += here && other != rank ? 1 : 0;
    }
    place.local_rank = start_up.local_rank.value_or(place.local_rank);
    place.local_size = start_up.local_size.value_or(place.local_size);
    return place;
}

Meeting meet(const StartUp& start_up, double timeout_seconds) {
    Meeting meeting;
    meeting.store = start_up.method == StartUp::Method::tcp
                        ? make_tcp_store(start_up, timeout_seconds)
                        : make_file_store(start_up, timeout_seconds);
    meeting.place = meet(*meeting.store, start_up);
    return meeting;
}

namespace {

class StoreStartNews final : public StartNews {
 public:
    StoreStartNews(std::shared_ptr<Store> store, const Place& place, int rank)
        : store_(std::move(store)), peers_(place.peers), rank_(rank) {}

    News news(bool last) override {
        News news;
        try {
            if (const auto failed = store_->find(kFailedKey)) {
                news.gone = printable(*failed);
            }
            if (last) {
                news.known = printable(store_->find(kSilentKey).value_or(""));
            }
        } catch (const Error& error) {  // rank 0's end is the store's
            news.gone = error.what();
        }
        for (const Place::Peer& peer : peers_) {
            const auto state =
                peer.process == 0 ? ProcessState::running : state_of_process(peer.process);
            if (state == ProcessState::gone && news.gone.empty() && !started(peer)) {
                news.gone = fmt::format("{} (process {}) has ended during the start", peer.name,
                                        peer.process);
            } else if (last && state == ProcessState::stopped &&
                       news.known.find(peer.name) == std::string::npos) {
                news.known += fmt::format("{}{} (process {}) is stopped",
                                          news.known.empty() ? "" : "; ", peer.name, peer.process);
            }
        }
        return news;
    }
    void started() override {
        try {
            store_->set(fmt::format("{}{}", kStartedKey, rank_), "");
        } catch (const Error&) {
            // Rank 0 has ended since: the watchdog says so.
        }
    }
    void leave(const std::string& reason) override {
        give_up_start(*store_, rank_, reason);
        store_->leave();
    }

 private:
    // A rank whose start was over may have ended since, for a reason of its own.
    bool started(const Place::Peer& peer) {
        try {
            return store_->find(fmt::format("{}{}", kStartedKey, &peer - peers_.data()))
                .has_value();
        } catch (const Error&) {
            return false;
        }
    }

    std::shared_ptr<Store> store_;
    std::vector<Place::Peer> peers_;
    int rank_;
};

}  // namespace

std::unique_ptr<StartNews> store_start_news(std::shared_ptr<Store> store, const Place& place,
                                            int rank) {
    return std::make_unique<StoreStartNews>(std::move(store), place, rank);
}

}  // namespace gyre::comm
