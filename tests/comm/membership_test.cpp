// The protocol of an elastic job's membership, played at random: processes begin, are killed, stop,
// wake and lose their connections at any moment, and messages arrive in any order that connections
// permit. Whatever happens, no two generations train at once, who is left agrees on the step, each
// result is written once, and the job trains on if somebody is left who has its state.
#include <algorithm>
#include <cstdlib>
#include <deque>
#include <limits>
#include <memory>
#include <random>
#include <string>

#include "comm/elastic/membership.hpp"
#include "tests/support/catch.hpp"

using namespace gyre::comm::elastic;

namespace {

constexpr std::size_t kMost = 3;  // ranks; more processes are spares

struct Term {  // a rank's part of a step's sums
    Generation generation;
    std::int64_t step;
    int rank;
};
struct Snapshot {
    Generation generation;
    std::int64_t step;
    std::set<std::int64_t> results;
};
using PeerMessage = std::variant<Term, Snapshot>;

struct Process {
    Member member;
    ProcessId id = 0;  // at the keeper
    bool alive = true, stopped = false;
    bool connected = true;  // as the keeper sees it
    std::deque<KeeperMessage> from_keeper;
    std::deque<std::pair<ProcessId, MemberMessage>> to_keeper;  // by which connection
    std::map<Process*, std::deque<PeerMessage>> from;           // the others
    std::map<std::pair<Generation, std::int64_t>, std::set<int>> terms;
    std::set<std::int64_t> results;  // that it keeps
    std::pair<Generation, std::int64_t> begun{};
    bool runs() const { return alive && !stopped; }
};

class World {
 public:
    explicit World(std::uint64_t seed) : random_(seed) {
        for (std::size_t i = 0; i < 2 + kMost / 2; ++i) {
            begin_process();
        }
    }

    // Returns what is wrong; empty: nothing is.
    std::string play() {
        for (int event = 0; event < 250 && fault_.empty(); ++event) {
            if (one_in(12)) {
                misfortune();
            } else {
                proceed();
            }
        }
        for (const auto& process : processes_) {
            process->stopped = false;
            if (!process->alive && process->connected) {
                disconnect(*process);
            }
        }
        const std::int64_t aim = last_ + 4;
        for (int event = 0; event < 20'000 && fault_.empty(); ++event) {
            proceed();
            // A process that has the state but lost its connection will join again.
            if (living() == 0 ||
                (keeper_.stranded() &&
                 std::none_of(processes_.begin(), processes_.end(), [&](const auto& process) {
                     return process->alive && process->member.state_of() == keeper_.trained();
                 }))) {
                return fault_;
            }
            if (keeper_.written() >= aim) {
                return fault_;
            }
        }
        return fault_.empty() ? "no progress" : fault_;
    }

 private:
    bool one_in(int n) { return std::uniform_int_distribution(1, n)(random_) == 1; }
    std::size_t below(std::size_t n) {
        return std::uniform_int_distribution<std::size_t>(0, n - 1)(random_);
    }
    std::int64_t living() const {
        return std::count_if(processes_.begin(), processes_.end(),
                             [](const auto& process) { return process->alive; });
    }

    void begin_process() { connect(*processes_.emplace_back(std::make_unique<Process>())); }

    void connect(Process& process) {
        process.id = ++ids_;
        process.connected = true;
        process.from_keeper.clear();
        send(keeper_.joined(process.id));
    }
    void disconnect(Process& process) {
        process.connected = false;
        send(keeper_.left(process.id));
    }
    Process* by_id(ProcessId id) const {
        for (const auto& process : processes_) {
            if (process->id == id) {
                return process.get();
            }
        }
        return nullptr;
    }
    void send(const Keeper::Out& messages) {
        for (const Keeper::Outgoing& out : messages) {
            if (const auto* go = std::get_if<Go>(&out.message)) {
                check_go(*go);
            }
            if (Process* const process = by_id(out.to)) {
                process->from_keeper.push_back(out.message);
            }
        }
    }
    void check_go(const Go& go) {
        went_[go.generation] = go.step;
        if (last_ > go.step + 1) {
            fault_ = "a generation begins more than a step behind what was complete";
        }
    }

    void misfortune() {
        Process& process = *processes_[below(processes_.size())];
        switch (below(6)) {
            case 0:
                if (process.alive) {
                    process.alive = false;
                    lose_some(process.to_keeper);
                    for (const auto& other : processes_) {
                        lose_some(other->from[&process]);
                    }
                }
                break;
            case 1:
                process.stopped = true;
                break;
            case 2:
                process.stopped = false;
                break;
            case 3:  // nothing has come from it for long, also if it only was slow
                if (process.connected) {
                    lose_some(process.to_keeper);
                    disconnect(process);
                }
                break;
            default:
                if (living() < static_cast<std::int64_t>(kMost) + 2) {
                    begin_process();
                }
        }
    }
    // Some of the messages that are on their way are lost.
    template <class Queue>
    void lose_some(Queue& queue) {
        queue.resize(below(queue.size() + 1));
    }

    void proceed() {
        Process& process = *processes_[below(processes_.size())];
        switch (below(5)) {
            case 0:
                keeper_receives(process);
                break;
            case 1:
                if (process.runs()) {
                    receive_from_keeper(process);
                }
                break;
            case 2:
                if (process.runs()) {
                    receive_from_peer(process, *processes_[below(processes_.size())]);
                }
                break;
            case 3:
                if (process.runs()) {
                    train(process);
                }
                break;
            default:
                if (process.runs()) {
                    notice(process);
                }
        }
    }

    void keeper_receives(Process& process) {
        if (!process.to_keeper.empty()) {
            const auto [id, message] = process.to_keeper.front();
            process.to_keeper.pop_front();
            send(keeper_.received(id, message));
        } else if (!process.alive && process.connected) {
            disconnect(process);
        }
    }

    void receive_from_keeper(Process& process) {
        if (process.from_keeper.empty()) {
            if (!process.connected) {  // it sees that, and joins again
                connect(process);
            }
            return;
        }
        const KeeperMessage message = process.from_keeper.front();
        process.from_keeper.pop_front();
        Member& member = process.member;
        if (const auto* form = std::get_if<Form>(&message)) {
            tell(process, member.received(*form));
        } else if (const auto* written = std::get_if<Written>(&message)) {
            member.received(*written);
        } else {
            const Go& go = std::get<Go>(message);
            const bool current = member.state_of() == before(go.generation);
            const std::int64_t steps = member.steps();
            if (!member.received(go, process.id)) {
                return;
            }
            if (current && go.step < steps) {
                fault_ = "a step that a member has done is lost";
            }
            if (member.state() == Member::State::training && go.step != steps) {
                fault_ = "a member trains from another step than the generation";
            }
            if (member.rank() == go.source) {
                for (const int rank : go.behind) {
                    send_peer(process, go.members[static_cast<std::size_t>(rank)],
                              Snapshot{go.generation, member.steps(), process.results});
                }
            }
        }
        report(process);
    }
    // The generation that went before this one.
    Generation before(Generation generation) const {
        const auto next = went_.lower_bound(generation);
        return next == went_.begin() ? 0 : std::prev(next)->first;
    }

    void send_peer(Process& from, ProcessId to, const PeerMessage& message) {
        if (Process* const process = by_id(to)) {
            process->from[&from].push_back(message);
        }
    }

    void receive_from_peer(Process& process, Process& peer) {
        auto& queue = process.from[&peer];
        if (queue.empty()) {
            return;
        }
        const PeerMessage message = queue.front();
        queue.pop_front();
        if (const auto* term = std::get_if<Term>(&message)) {
            process.terms[{term->generation, term->step}].insert(term->rank);
            return;
        }
        const auto& snapshot = std::get<Snapshot>(message);
        Member& member = process.member;
        if (member.state() == Member::State::waiting && snapshot.generation > member.generation()) {
            queue.push_front(message);  // it comes before Go: it waits until that is there
            return;
        }
        const Member::State state = member.state();
        member.state_arrived(snapshot.generation, snapshot.step);
        if (state != member.state()) {
            process.results = snapshot.results;
            report(process);
        }
    }

    void train(Process& process) {
        Member& member = process.member;
        const std::pair next{member.generation(), member.steps() + 1};
        if (member.may_begin() && process.begun != next) {
            process.begun = next;
            process.terms[next].insert(member.rank());
            for (const ProcessId other : member.go().members) {
                if (other != process.id) {
                    send_peer(process, other, Term{next.first, next.second, member.rank()});
                }
            }
        }
        if (member.state() == Member::State::training && process.begun == next &&
            process.terms[next].size() == member.go().members.size()) {
            member.complete();
            check_step(next.first, next.second);
            process.results.insert(next.second);
            process.results.erase(next.second - Member::kWindow);
            report(process);
        }
    }
    void check_step(Generation generation, std::int64_t step) {
        last_ = std::max(last_, step);
        for (auto later = went_.upper_bound(generation); later != went_.end(); ++later) {
            if (step > later->second + 1) {
                fault_ = "two generations train at once";
            }
        }
    }

    // A member of its generation is gone or does not answer.
    void notice(Process& process) {
        Member& member = process.member;
        for (const ProcessId other : member.go().members) {
            const Process* const peer = by_id(other);
            if (member.state() != Member::State::waiting && (peer == nullptr || !peer->runs())) {
                if (const auto lost = member.lost(member.generation())) {
                    tell(process, *lost);
                }
            }
        }
    }

    void report(Process& process) {
        for (const Report& due : process.member.due_reports()) {
            if (!process.results.contains(due.step)) {
                fault_ = "a result is to be written that the reporter does not have";
            }
            tell(process, due);
        }
    }
    void tell(Process& process, const MemberMessage& message) {
        process.to_keeper.emplace_back(process.id, message);
    }

    std::mt19937_64 random_;
    Keeper keeper_{1, kMost};
    std::vector<std::unique_ptr<Process>> processes_;
    ProcessId ids_ = 0;
    std::map<Generation, std::int64_t> went_;  // the step of each Go
    std::int64_t last_ = 0;                    // the latest step that anybody has done
    std::string fault_;
};

}  // namespace

TEST_CASE("whoever is lost or comes, one generation trains, from one step, and writes each once") {
    // More of them: GYRE_TEST_SCHEDULES=1000000.
    const char* const given = std::getenv("GYRE_TEST_SCHEDULES");
    const std::uint64_t schedules = given == nullptr ? 20'000 : std::strtoull(given, nullptr, 10);
    std::string fault;
    std::uint64_t schedule = 0;
    for (; schedule < schedules && fault.empty(); ++schedule) {
        fault = World(schedule).play();
    }
    INFO("schedule " << schedule - 1);
    CHECK(fault == std::string());
}

TEST_CASE("a keeper forms a generation of those who have the state, and spares wait") {
    Keeper keeper(2, 2);
    CHECK(!keeper.stranded());  // nobody has come yet
    CHECK(std::get<Form>(keeper.joined(1).at(0).message).generation == 1);
    CHECK(keeper.received(1, Ready{1, 0, 0}).empty());  // too few
    CHECK(keeper.joined(2).size() == 1);
    const Keeper::Out first = keeper.received(2, Ready{1, 0, 0});
    REQUIRE(first.size() == 2);
    CHECK(std::get<Go>(first[0].message).members == std::vector<ProcessId>{1, 2});
    CHECK(std::get<Go>(first[0].message).behind.empty());
    CHECK(keeper.joined(3).empty());  // a spare
    CHECK(keeper.received(1, Report{1}).size() == 1);
    CHECK(keeper.received(1, Report{1}).empty());  // it is written
    CHECK(keeper.received(3, Report{2}).empty());  // a spare has none

    CHECK(keeper.left(1).size() == 2);
    CHECK(keeper.received(3, Ready{2, 0, 0}).empty());
    const Keeper::Out second = keeper.received(2, Ready{2, 1, 1});
    REQUIRE(second.size() == 2);
    const Go& go = std::get<Go>(second[0].message);
    CHECK(go.members == std::vector<ProcessId>{2, 3});
    CHECK(go.step == 1);
    CHECK(go.source == 0);
    CHECK(go.behind == std::vector{1});
    CHECK(go.written == 1);

    // Nobody is left who has the state.
    CHECK(keeper.left(2).size() == 1);
    keeper.received(3, Ready{3, 0, 0});
    keeper.joined(4);
    CHECK(!keeper.stranded());
    keeper.received(4, Ready{3, 0, 0});
    CHECK(keeper.stranded());
}
