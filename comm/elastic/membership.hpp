// The protocol that decides which processes of an elastic job train together. It runs between a
// keeper, which outlives every rank, and the members. Both are state machines without threads,
// clocks or connections: they take what has arrived and say what is to be sent. docs/elastic.md
// draws their states and says what they guarantee; tests/comm/membership_test.cpp plays it.
//
// Messages between the keeper and one member arrive in order, or the connection ends. A process
// whose connection has ended may join again, as another one.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <variant>
#include <vector>

namespace gyre::comm::elastic {

using ProcessId = std::int64_t;   // of one connection to the keeper; never used again
using Generation = std::int64_t;  // of the membership, from 1; 0: before the first

// From the keeper.
struct Form {  // a new membership: stop training and say where you are
    Generation generation = 0;
};
struct Go {  // train from here
    Generation generation = 0;
    std::vector<ProcessId> members;  // by rank
    std::int64_t step = 0;           // steps done; all members have, or get, the state after them
    int source = 0;                  // the rank that gives its state to those who are behind
    std::vector<int> behind;         // their ranks
    std::int64_t written = 0;        // steps whose results are written
};
struct Written {
    std::int64_t steps = 0;
};
using KeeperMessage = std::variant<Form, Go, Written>;

// From a member.
struct Ready {  // the answer to Form
    Generation generation = 0;
    Generation state_of = 0;  // the generation to which its state belongs
    std::int64_t step = 0;    // steps done
};
struct Lost {  // a member of the generation cannot be reached
    Generation generation = 0;
};
struct Report {  // the results of a step, which the keeper writes
    std::int64_t step = 0;
};
using MemberMessage = std::variant<Ready, Lost, Report>;

class Keeper {
 public:
    struct Outgoing {
        ProcessId to = 0;
        KeeperMessage message;
    };
    using Out = std::vector<Outgoing>;

    // least, most: members of a generation.
    Keeper(std::size_t least, std::size_t most) : least_(least), most_(most) {}

    // A process has connected; its connection has ended, or was ended as nothing came by it; a
    // message has come.
    Out joined(ProcessId process);
    Out left(ProcessId process);
    Out received(ProcessId process, const MemberMessage& message);

    // The latest generation, and that of the latest Go.
    Generation generation() const { return generation_; }
    Generation trained() const { return trained_; }
    std::int64_t written() const { return written_; }
    // True if somebody is connected, all who are have answered, and nobody has the state of the
    // last generation that trained. Unless a process that has it, but lost its connection, joins
    // again, the job can only begin again from a checkpoint.
    bool stranded() const {
        return forming_ && !connected_.empty() && all_answered() && !knows_last();
    }

 private:
    Out form();
    Out go_if_complete();
    bool all_answered() const;
    bool is_current(const Ready& answer) const { return answer.state_of == trained_; }
    bool knows_last() const;

    const std::size_t least_, most_;
    std::map<ProcessId, std::optional<Ready>> connected_;  // with the answer to the last Form
    std::set<ProcessId> members_;                          // of the last Go
    Generation generation_ = 1, trained_ = 0;
    bool forming_ = true;
    std::int64_t written_ = 0;
};

// A process of the job. It begins with the state after 0 steps, as all do.
class Member {
 public:
    // The steps that the reporter may be ahead of what is written, and whose results all keep.
    static constexpr std::int64_t kWindow = 2;
    enum class State {
        waiting,      // for Go
        catching_up,  // for the state of the source
        training
    };

    // The answer ends its part in the generation before: it sends no more for its steps.
    Ready received(const Form& form);
    // Returns whether the Go is for this process as it is now; `self` is its number at the keeper.
    bool received(const Go& go, ProcessId self);
    void received(const Written& written) { written_ = written.steps; }
    // The source's state has come, with the results that it keeps.
    void state_arrived(Generation generation, std::int64_t step);
    // Returns whether step steps() + 1 may begin.
    bool may_begin() const {
        return state_ == State::training && (rank_ != 0 || step_ - written_ < kWindow);
    }
    // All sums of the step after steps() have come: it is done.
    void complete() { ++step_; }
    // Another member cannot be reached: the step is given up. Nothing is to be sent if this process
    // has no part in the generation any more.
    std::optional<Lost> lost(Generation generation);
    // The results that it is to report now, in their order.
    std::vector<Report> due_reports();

    State state() const { return state_; }
    Generation generation() const { return go_.generation; }
    const Go& go() const { return go_; }
    int rank() const { return rank_; }
    std::int64_t steps() const { return step_; }
    Generation state_of() const { return state_of_; }

 private:
    State state_ = State::waiting;
    Generation asked_ = 0;     // the last Form's
    Generation state_of_ = 0;  // to which its state belongs
    Go go_;
    int rank_ = 0;
    std::int64_t step_ = 0, written_ = 0, reported_ = 0;
};

}  // namespace gyre::comm::elastic
