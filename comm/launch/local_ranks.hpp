// Ranks of a job as processes of this host, started and looked after by their parent: what
// torchrun does, on one host without a port.
#pragma once

#include <string>
#include <vector>

#include "comm/launch/nodes.hpp"

namespace gyre::comm {

// Which ranks of a job a launcher starts.
struct LocalRanksSpec {
    int ranks = 1;         // on this host
    NodesSpec hosts = {};  // of the job, each with a launcher
    // How often all ranks are started again, after a pause, where one was killed, has crashed or
    // lost the others; not after what would come again, nor once a signal asked them to end.
    int max_restarts = 0;
};

// Starts spec.ranks processes of `command` (its first word the program's path), which find each
// other by their environment (GYRE_LAUNCH_DIR, GYRE_MOST_RANKS, and torchrun's RANK, WORLD_SIZE,
// LOCAL_RANK, LOCAL_WORLD_SIZE, GROUP_RANK, GROUP_WORLD_SIZE, TORCHELASTIC_RESTART_COUNT and, with
// several hosts, MASTER_ADDR and MASTER_PORT), and waits for all of them. Their lines come out
// behind "[RANK] "; what follows kClearLine is drawn at once, and drawn over by what comes next.
//
// SIGINT, SIGTERM, SIGHUP, SIGUSR1 and SIGUSR2 go to all ranks. If a signal ends one, and all may
// start again, the others are killed at once. If one fails otherwise, the others have kGraceSeconds
// to end by themselves, then as long after a SIGTERM, then they are killed, and those that are
// stopped at once. No rank outlives its parent. Where hosts come, leave or are lost, the ranks of
// the others are asked to end, as by SIGTERM, and start again (comm/launch/nodes.hpp); after
// SIGINT, SIGTERM or SIGHUP so do those of the other hosts. Returns 0, or the exit code of the
// first that failed, 128 + N if signal N ended it. Throws Error(communication) if processes cannot
// be started.
int run_local_ranks(const LocalRanksSpec& spec, const std::vector<std::string>& command);

// The variable by which such a rank knows where to meet.
constexpr const char* kLaunchFolder = "GYRE_LAUNCH_DIR";
// How many launchers there are, each on a host of its own: with several, ranks meet at MASTER_ADDR.
constexpr const char* kLaunchNodes = "GROUP_WORLD_SIZE";
// How often this host's ranks have been started again.
constexpr const char* kLaunchRestarts = "TORCHELASTIC_RESTART_COUNT";
// How many ranks the job has if all hosts take part.
constexpr const char* kMostRanks = "GYRE_MOST_RANKS";

// Begins a line that is not ended but drawn over, such as a bar of progress.
constexpr const char* kClearLine = "\r\033[K";
constexpr int kRankColumns = 4;  // that "[0] " takes before the lines of rank 0, which draws bars

}  // namespace gyre::comm
