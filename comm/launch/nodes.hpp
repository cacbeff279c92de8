// The hosts of a job, each with a launcher: which of them take part, agreed on before each start of
// the ranks.
//
// The launcher of host 0 serves a store (comm/launch/tcp_server.hpp). The others may be lost,
// leave, and come again; where host 0's is lost, they wait for a new one. Each start is a
// generation g, in one store:
//
//   g/node/i     host i is there, with so many ranks: those of earlier generations have ended. It
//                stays while that launcher is connected
//   g/members    host 0 begins the generation with these hosts
//   g/regroup    the ranks of the generation are to save and end, as a host has come or leaves
//   g/left/i     host i will not be in the next generation
//   end          there is no further generation
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "comm/launch/rendezvous.hpp"

namespace gyre::comm {

struct NodesSpec {
    int least = 1, most = 1;       // hosts that take part
    int node = 0;                  // this host's number, below `most`
    std::string master_addr = {};  // of host 0, where the launchers meet,
    int master_port = 29500;       // at this port, torchrun's; the ranks meet at another one
    double rejoin_timeout = 30.0;  // seconds that a generation waits for hosts that it could begin
                                   // without
    bool insecure = false;         // they may meet without a secret
};

// The place of a host's ranks in one generation.
struct NodePlace {
    int first_rank = 0, world_size = 1;
    int number = 0, nodes = 1;  // of the hosts that take part
    int most_ranks = 1;         // if all hosts took part
    int master_port = 0;        // where rank 0 listens, if there are several
};

class NodeMeeting {
 public:
    // ranks: of this host. Host 0 listens from now on; others wait until it does. Throws
    // Error(communication).
    NodeMeeting(const NodesSpec& spec, int ranks);

    // Waits for the next generation. Collective. Nothing if the job has ended, or if
    // asked(seconds), which waits for so long, says that this launcher is to end. Throws
    // Error(communication), also where too few hosts come, or host 0 is lost and, in a job that
    // does not need all hosts, not started again.
    std::optional<NodePlace> meet(const std::function<bool(double)>& asked);

    // While the ranks run. True on host 0, once for each generation, if its ranks are to save and
    // end so that another host can take part.
    bool is_awaited();
    // Before the ranks of this host are asked to end: the others then train on without it. Host 0,
    // and each host of a job that needs all of them, ends the job.
    void leave();
    // After the ranks have ended: true if they were to, for another generation.
    bool regroups();
    // There is no further generation for this host.
    void end();

 private:
    std::string key(const char* name, int generation) const;
    std::string key(const char* name, int generation, int node) const;
    std::optional<std::string> find(const std::string& key);
    bool set(const std::string& key, const std::string& value);
    void require_store() const;
    void arrive();
    std::optional<NodePlace> meet_there(const std::function<bool(double)>& asked);
    bool gather(const std::function<bool(double)>& asked);
    // With the hosts of these numbers and their ranks, and without these of the last generation.
    void begin(const std::vector<std::pair<int, int>>& present, const std::vector<int>& missing);
    std::optional<NodePlace> place_in(const std::string& members);
    bool is_member(int node) const;

    const NodesSpec spec_;
    const int ranks_;
    std::string mine_;  // this host's ranks, and what tells it from others of its number
    std::unique_ptr<Store> store_;  // nullptr: the connection to host 0 is lost
    int generation_ = 0;
    std::vector<int> members_;  // of the last generation that began; before: all
    bool awaited_ = false;      // is_awaited() was true in it
};

}  // namespace gyre::comm
