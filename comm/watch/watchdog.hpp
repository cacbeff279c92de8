// Prevents silent hangs: wraps a communicator so that every wait has a deadline.
//
// A thread on each rank tells the others its progress over separate TCP connections (a star around
// rank 0); so it works whatever the inner communicator is busy with, and whether or not that
// library can be interrupted. A rank that waits for longer than the deadline, or whose peer's
// process has ended, reports once for the job which collective it is, which ranks had arrived, and
// which had not and on which hosts. It then writes its flight record, and ends the job with exit
// code 4 within a few seconds, even if the library's abort hangs.
#pragma once

#include <memory>
#include <string>

#include "base/option_names.hpp"
#include "comm/communicator.hpp"

namespace gyre::comm {

struct WatchOptions {
    double timeout_seconds = 60.0;  // limit of one wait
    double warning_seconds = 5.0;   // a job that waits for longer says for whom it waits
    // Where each rank writes its last collectives on failure, as PATH.rankN.json; empty: nowhere.
    // docs/design.md says how to read it.
    std::string flight_record;
    double setup_seconds = 120.0;  // limit for use_device()
    Wording wording = {};          // of the messages on failure
};

// Collective. Ranks that cannot reach rank 0's extra port print a warning and are watched without
// news of the others.
std::unique_ptr<Communicator> make_watched_communicator(std::unique_ptr<Communicator> inner,
                                                        const WatchOptions& options);

}  // namespace gyre::comm
