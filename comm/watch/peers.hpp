// The watchdogs' view of all ranks: their progress, exchanged over separate TCP connections in a
// star around rank 0, and messages that name late or missing ranks.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/clock.hpp"
#include "comm/communicator.hpp"
#include "comm/watch/link.hpp"

namespace gyre::comm {

// A rank's progress. It is sent as raw memory: all ranks run the same program on the same kind of
// machine.
struct Status {
    std::int32_t rank = 0;
    // kReporting: the rank has something to report; kSpeaker: rank 0 has chosen it to do so.
    enum Flag : std::int32_t {
        kLeaving = 1,
        kClosed = 2,
        kReporting = 4,
        kFailing = 8,
        kSpeaker = 16
    };
    std::int32_t flags = 0;
    std::int64_t started = 0, finished = 0;  // collectives
    std::int64_t step = -1;
    float waiting = -1.0f;  // seconds; < 0: the rank does not wait
    float silent = 0.0f;    // seconds since rank 0 last heard from it
};

class Peers {
 public:
    // Called by all ranks. Warns if rank 0's port cannot be reached. Throws Error(communication) on
    // all ranks if the environment names an interface that rank 0's host does not have.
    explicit Peers(Communicator& comm);

    // Sends this rank's status to the others and receives theirs.
    void exchange(const Status& own);

    // any_gone(): whether a rank's process has ended without taking its leave. any_at_fault():
    // whether one of these did not end because another had.
    bool any_gone() const;
    bool any_at_fault() const;
    // True if this rank speaks for the job: it is the lowest one that waits and answers, unless
    // another reports.
    bool speaks() const;
    // The rank with kReporting that rank 0 heard from first; -1: none, or no news. Ranks that meet
    // the same error at the same moment cannot agree without rank 0.
    int speaker() const { return speaker_; }
    // True if rank 0 can be asked who speaks.
    bool reaches_root() const { return rank_ == 0 || links_[0].open(); }
    // Describes the ranks that are at fault or silent.
    std::string absent_ranks() const;
    // Lists the ranks that have started the collective with this number, and describes the others.
    std::string late_ranks(std::int64_t number) const;

    const std::string& host() const { return hosts_[static_cast<std::size_t>(rank_)]; }

 private:
    void connect(Communicator& comm);
    void connect_to_root(const std::string& address, std::uint16_t port, const Secret& secret);
    void accept_all(const Secret& secret);
    void warn_of_foreign();
    void exchange_with_root();
    void exchange_with_all();
    std::string name(const Status& status) const;

    const int rank_, size_;
    std::vector<std::string> hosts_;  // [rank]
    Socket listener_;
    std::vector<Link> links_;    // rank 0: to each rank; others: [0], to rank 0
    std::vector<bool> joined_;   // [rank]: the link was established, so its end means something
    std::vector<Status> table_;  // [rank]
    std::vector<Clock::time_point> heard_;
    int speaker_ = -1;
    bool warned_ = false;
};

}  // namespace gyre::comm
