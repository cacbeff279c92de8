// The meeting of the ranks, through a store (tcp_store.cpp, file_store.cpp).
#include "comm/rendezvous.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <ctime>
#include <fstream>
#include <random>
#include <sstream>
#include <thread>

#include "comm/meeting_error.hpp"
#include "kernels/clock.hpp"
#include "kernels/host_name.hpp"

namespace gyre::comm {
namespace {

using namespace std::chrono_literals;

constexpr auto kAskInterval = 10ms;  // for a key that is not there yet
constexpr auto kLinger = 300ms;      // in which the others learn that rank 0 gives up

// What each rank says of itself, line by line.
struct RankFacts {
    std::string version, world_size, job_id, host, machine, process, nonce, time;
    std::string text() const {
        return fmt::format("{}\n{}\n{}\n{}\n{}\n{}\n{}\n{}\n", version, world_size, job_id, host,
                           machine, process, nonce, time);
    }
    static RankFacts parse(const std::string& text) {
        RankFacts facts;
        std::istringstream in(text);
        for (std::string* line : {&facts.version, &facts.world_size, &facts.job_id, &facts.host,
                                  &facts.machine, &facts.process, &facts.nonce, &facts.time}) {
            std::getline(in, *line);
        }
        return facts;
    }
    std::string who() const {
        return fmt::format("process {} on {}, started {}", process, host, time);
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
    std::string job_id = start_up.job_id;
    std::replace(job_id.begin(), job_id.end(), '\n', ' ');
    return {GYRE_VERSION,
            std::to_string(start_up.world_size),
            job_id,
            host_name(),
            host_name() + "/" + boot,
            std::to_string(getpid()),
            fmt::format("{:08x}{:08x}", random(), random()),
            time.data()};
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

// Waits for a key of the meeting; at the deadline, says who has not come.
std::string await(Store& store, const std::string& key, int world_size) {
    for (;;) {
        if (auto value = store.find(key)) {
            return *value;
        }
        if (const auto failure = store.find("failed")) {
            throw meeting_error(*failure);
        }
        if (Clock::now() > store.deadline) {
            std::vector<int> missing;
            std::string refused;
            for (int rank = 0; rank < world_size; ++rank) {
                if (!store.find(rank_key(rank))) {
                    missing.push_back(rank);
                    if (const auto text = store.find(fmt::format("refused/{}", rank))) {
                        refused += fmt::format("\n  refused: {}", *text);
                    }
                }
            }
            if (missing.empty()) {
                throw meeting_error(fmt::format("rank 0 at {} has stopped answering; {}",
                                                store.where(), store.remedy()));
            }
            if (missing.front() == 0) {  // the others come only after it
                missing = {0};
            }
            throw meeting_error(fmt::format(
                "{} of {} ranks did not come to {} within --init-timeout; missing: rank{} {}. "
                "Start them with the same --init-method and --world-size, check that they reach "
                "that address, or raise --init-timeout{}",
                missing.size(), world_size, store.where(), missing.size() == 1 ? "" : "s",
                fmt::join(missing, ", "), refused));
        }
        std::this_thread::sleep_for(kAskInterval);
    }
}

}  // namespace

std::string Store::get(const std::string& key) {
    for (;;) {
        if (auto value = find(key)) {
            return *value;
        }
        if (Clock::now() > deadline) {
            throw meeting_error(
                fmt::format("'{}' was not said at {} within --init-timeout; a rank "
                            "may have ended during the start",
                            key, where()));
        }
        std::this_thread::sleep_for(kAskInterval);
    }
}

Place meet(Store& store, const StartUp& start_up) {
    const int rank = start_up.rank, size = start_up.world_size;
    const RankFacts mine = own_facts(start_up);
    bool joined = false;
    std::vector<RankFacts> all;
    try {
        if (rank == 0) {
            joined = store.set(rank_key(0), mine.text());
        } else {
            const RankFacts root = RankFacts::parse(await(store, rank_key(0), size));
            try {
                require_same_job(store, mine, root, rank);
            } catch (const Error& error) {
                store.set(fmt::format("refused/{}", rank), error.what());
                throw;
            }
            joined = store.set(rank_key(rank), mine.text());
        }
        if (!joined) {
            const RankFacts first = RankFacts::parse(store.find(rank_key(rank)).value_or(""));
            throw meeting_error(fmt::format(
                "rank {} is already at {} ({}): another rank has the same --rank, or this is "
                "another or an earlier job's; {}",
                rank, store.where(), first.who(), store.remedy()));
        }
        std::string nonces;
        for (int other = 0; other < size; ++other) {
            all.push_back(RankFacts::parse(await(store, rank_key(other), size)));
            nonces += all.back().nonce + ' ';
        }
        // Whoever is there must be there now: rank 0 answers with what each of them has just made
        // up, which what an earlier job left behind cannot.
        if (rank == 0) {
            store.set("all", nonces);
        } else if (await(store, "all", size) != nonces) {
            throw meeting_error(fmt::format("what is at {} is another or an earlier job's; {}",
                                            store.where(), store.remedy()));
        }
    } catch (const Error& error) {
        if (joined) {
            try {
                store.set("failed", fmt::format("rank {} on {} gave up the start: {}", rank,
                                                host_name(), error.what()));
            } catch (const Error&) {
                // The others will meet their own deadline.
            }
            if (rank == 0) {
                std::this_thread::sleep_for(kLinger);
            }
        }
        throw;
    }
    Place place;
    place.host = mine.host;
    place.machine = mine.machine;
    for (int other = 0; other < size; ++other) {
        const bool here = all[static_cast<std::size_t>(other)].machine == mine.machine;
        place.one_host = place.one_host && here;
        place.local_rank += here && other < rank ? 1 : 0;
        place.local_size += here && other != rank ? 1 : 0;
    }
    place.local_rank = start_up.local_rank.value_or(place.local_rank);
    place.local_size = start_up.local_size.value_or(place.local_size);
    return place;
}

}  // namespace gyre::comm
