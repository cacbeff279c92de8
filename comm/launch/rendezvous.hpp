// How the ranks of a job find each other without mpirun: what a rank knows at its start, from flags
// or from a launcher's environment, and a store of keys and values through which they exchange the
// rest.
#pragma once

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "comm/communicator.hpp"
#include "comm/launch/launch_spec.hpp"
#include "comm/launch/secret.hpp"
#include "comm/launch/start_alarm.hpp"

namespace gyre::comm {

// Who meets over TCP, in messages.
struct MeetingWords {
    std::string member = "rank";
    std::string time_limit = "`init-timeout`";
    std::string flags = "`init-method`";  // that lead them to the same place
    std::string apart = "choose another port, or `job-id` for jobs on one port";  // of another job
};

// A rank's knowledge when it starts.
struct StartUp {
    enum class Method { single, mpi, tcp, file };
    Method method = Method::single;
    std::string launcher;         // who said so, for messages
    std::string launcher_remedy;  // where MPI does not see the launcher's ranks
    bool own_terminal = false;    // started one by one: no launcher gathers what the ranks print
    int rank = 0, world_size = 1;
    std::optional<int> local_rank, local_size;
    std::string host;            // tcp: where rank 0 listens,
    std::vector<int> ports;      // on the first of these that is free
    std::filesystem::path path;  // file
    std::string job_id;
    Secret secret;
    bool insecure = false;  // tcp: without a secret, other hosts may reach the meeting
    MeetingWords words = {};
};

// Throws Error(usage) for flags that do not fit together, Error(communication) for an environment
// that does not suffice.
StartUp find_start_up(const LaunchSpec& options);

// Limits of a meeting's store: the ranks' facts, and Gloo's address of each pair of ranks,
// twice.
struct StoreLimits {
    explicit StoreLimits(int world_size)
        : value(std::min<std::size_t>(16 << 20, 4096 + 256 * static_cast<std::size_t>(world_size))),
          all((1 << 20) + 4 * value * static_cast<std::size_t>(world_size)) {}
    static constexpr std::size_t key = 128;
    std::size_t value, all;  // bytes
};

// Keys and values shared by all ranks of a job. A key is set once, by whoever comes first. For
// several threads.
class Store {
 public:
    virtual ~Store() = default;
    // False if the key was there already.
    virtual bool set(const std::string& key, const std::string& value) = 0;
    virtual std::optional<std::string> find(const std::string& key) = 0;
    virtual std::string where() const = 0;  // for messages
    // How to get rid of what an earlier job left here.
    virtual std::string remedy() const = 0;
    // This host's address in the network that the ranks met over; empty: unknown.
    virtual std::string local_address() const { return {}; }
    // Removes what this job has left at the meeting place, if a process ends without destroying
    // the store.
    virtual void leave() {}

    // Waits for the key, which `who` sets, until the deadline of the start. Throws
    // Error(communication), also where another rank has given up.
    std::string get(const std::string& key, const std::string& who);

    std::chrono::steady_clock::time_point deadline;
};

// Rank 0 serves the store until it is destroyed; others connect, and retry until the deadline.
std::unique_ptr<Store> make_tcp_store(const StartUp& start_up, double timeout_seconds);
// A folder that all ranks see; rank 0 removes it when the store is destroyed.
std::unique_ptr<Store> make_file_store(const StartUp& start_up, double timeout_seconds);

// Keys with a meaning of their own. The first is set by a rank that gives up the start, or for one
// that has ended; the second asks for the ranks that are not heard of; the third, with a rank's
// number, says that its start is over.
constexpr const char* kFailedKey = "failed";
constexpr const char* kSilentKey = "silent";
constexpr const char* kStartedKey = "started/";

// Where a rank runs.
struct Place {
    // Another rank.
    struct Peer {
        std::string name;  // for messages
        int process = 0;   // that can be asked about from here; 0: it cannot
    };
    std::vector<Peer> peers;  // [rank]
    std::string name(int rank) const {
        return rank < 0 || rank >= static_cast<int>(peers.size())
                   ? "a rank"
                   : peers[static_cast<std::size_t>(rank)].name;
    }
    std::string host;
    std::string token;    // the same on all ranks of this job; no other job has it
    std::string machine;  // the same for ranks that share a machine and its name
    int local_rank = 0, local_size = 1;
    bool one_host = true;  // all ranks of the job
};

// The result of a meeting.
struct Meeting {
    std::shared_ptr<Store> store;
    Place place;
};
// Waits until all ranks are there and makes sure that they belong to one job that starts now.
// Collective; throws Error(communication).
Meeting meet(const StartUp& start_up, double timeout_seconds);
// In a store that is there.
Place meet(Store& store, const StartUp& start_up);

// Tells the other ranks that this one ends, and why, unless they have heard of a reason already.
// Rank 0, with which the store ends, gives them the time to read it.
void give_up_start(Store& store, int rank, const std::string& reason);

// News of the other ranks, after the meeting, from the store and the table of processes.
std::unique_ptr<StartNews> store_start_news(std::shared_ptr<Store> store, const Place& place,
                                            int rank);

// The communicator that options and environment ask for. The alarm, if there are several ranks,
// continues to watch until it is stopped; without one, the start is watched until this returns.
std::unique_ptr<Communicator> make_communicator(const LaunchSpec& options, StartAlarm& alarm);
std::unique_ptr<Communicator> make_communicator(const LaunchSpec& options);

// The most ranks that the job may have, as gyre launch says it to all of them; otherwise 1.
int most_ranks();

// True if Gloo was found when gyre was built.
bool gloo_available();
// Collective: meets the other ranks as start_up says.
std::unique_ptr<Communicator> make_gloo_communicator(const StartUp& start_up,
                                                     const LaunchSpec& options, StartAlarm& alarm);

}  // namespace gyre::comm
