// What the watchdogs of all ranks know of each other: how far each rank is, exchanged over TCP
// connections of their own, a star around rank 0; and who is late or gone, in words.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "comm/communicator.hpp"
#include "comm/watch/link.hpp"
#include "kernels/base/clock.hpp"

namespace gyre::comm {

// How far a rank is. Sent as it is: all ranks run the same program on the same kind of machine.
struct Status {
    std::int32_t rank = 0;
    // kReporting: has something to report; kSpeaker: rank 0 has chosen it to do so.
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
    float silent = 0.0f;    // seconds that rank 0 has not heard of it
};

class Peers {
 public:
    // Called by all ranks. Says so where rank 0's port cannot be reached.
    explicit Peers(Communicator& comm);

    // Tells the others this rank's status, and takes in what they have told.
    void exchange(const Status& own);

    // Whether a rank's process has ended without its leave; and not because it had noticed that
    // another has.
    bool any_gone() const;
    bool any_at_fault() const;
    // One rank speaks for the job: the lowest that waits and is heard, unless another reports.
    bool speaks() const;
    // Of the ranks with kReporting, the one that rank 0 has heard of first; -1: none, or no news.
    // Ranks that meet the same error in the same moment cannot agree without it.
    int speaker() const { return speaker_; }
    // Whether rank 0 can be asked who speaks.
    bool reaches_root() const { return rank_ == 0 || links_[0].open(); }
    // The ranks that are at fault or silent, in words.
    std::string absent_ranks() const;
    // Which ranks have started the collective with this number, and how those are that have not.
    std::string late_ranks(std::int64_t number) const;

    const std::string& host() const { return hosts_[static_cast<std::size_t>(rank_)]; }

 private:
    void connect(Communicator& comm);
    void connect_to_root(const std::string& addresses, std::uint16_t port, std::uint64_t token);
    void accept_all(std::uint64_t token);
    void exchange_with_root();
    void exchange_with_all();
    std::string name(const Status& status) const;

    const int rank_, size_;
    std::vector<std::string> hosts_;  // [rank]
    Socket listener_;
    std::vector<Link> links_;    // rank 0: to each rank; others: [0], to rank 0
    std::vector<bool> joined_;   // [rank]: the link was made, so that its end means something
    std::vector<Status> table_;  // [rank]
    std::vector<Clock::time_point> heard_;
    int speaker_ = -1;
};

}  // namespace gyre::comm
