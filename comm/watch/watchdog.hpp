// No silent hang: a communicator around another, in which every wait has a deadline.
//
// A thread on each rank tells the others, over TCP connections of its own (a star around rank 0),
// how far its rank is; so it works whatever the communicator inside is busy with, and whether or
// not that library can be interrupted. A rank that waits for longer than the deadline, or whose
// peer's process has ended, reports which collective it is, which ranks had arrived, which had not
// and on which hosts, once for the job; writes its flight record; and ends the job with exit code 4
// within a few seconds, even where the library's own abort hangs.
#pragma once

#include <memory>
#include <string>

#include "comm/communicator.hpp"
#include "kernels/base/option_names.hpp"

namespace gyre::comm {

struct WatchOptions {
    double timeout_seconds = 60.0;  // of one wait
    double warning_seconds = 5.0;   // after which a waiting job says for whom it waits
    // Where each rank writes its last collectives on failure, as PATH.rankN.json; empty: nowhere.
    // docs/design.md says how to read it.
    std::string flight_record;
    double setup_seconds = 120.0;  // that use_device() may take
    Wording wording = {};          // of what is printed on failure
};

// Collective. Ranks that cannot reach rank 0's extra port are watched without news of the others,
// which a warning says.
std::unique_ptr<Communicator> make_watched_communicator(std::unique_ptr<Communicator> inner,
                                                        const WatchOptions& options);

}  // namespace gyre::comm
