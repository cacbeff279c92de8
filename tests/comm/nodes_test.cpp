// The launchers of several hosts, which agree on who takes part in the next start of the ranks.
#include "comm/launch/nodes.hpp"

#include <chrono>
#include <functional>
#include <future>
#include <memory>
#include <utility>

#include "base/clock.hpp"
#include "tests/program/meeting.hpp"
#include "tests/support/expect_error.hpp"

using namespace gyre;
using namespace gyre::comm;
using gyre::test::expect_error;
using gyre::test::free_port;
using gyre::test::sleep_ms;

namespace {

using Found = std::future<std::optional<NodePlace>>;

// Gives up after a minute. waits: called once the host waits for others.
Found meet(NodeMeeting& host, std::function<void()> waits = {}) {
    return std::async(std::launch::async, [&host, waits, begin = Clock::now()]() mutable {
        return host.meet([&waits, begin](double seconds) {
            if (waits) {
                std::exchange(waits, {})();
            }
            sleep_ms(static_cast<int>(seconds * 1000.0));
            return seconds_since(begin) > 60.0;
        });
    });
}

// The same, and returns once the host waits.
Found await_meeting(NodeMeeting& host) {
    auto waits = std::make_shared<std::promise<void>>();
    Found found = meet(host, [waits] { waits->set_value(); });
    REQUIRE(waits->get_future().wait_for(std::chrono::minutes(1)) == std::future_status::ready);
    return found;
}

// The hosts of one job, which are threads here.
class Hosts {
 public:
    Hosts(int least, int most, int port = free_port()) : least_(least), most_(most), port_(port) {}
    std::unique_ptr<NodeMeeting> make(int node, int ranks) const {
        return std::make_unique<NodeMeeting>(NodesSpec{.least = least_,
                                                       .most = most_,
                                                       .node = node,
                                                       .master_addr = "127.0.0.1",
                                                       .master_port = port_,
                                                       .rejoin_timeout = 0.0},
                                             ranks);
    }

 private:
    const int least_, most_, port_;
};

void check_place(const std::optional<NodePlace>& place, int number, int nodes, int first_rank,
                 int world_size) {
    REQUIRE(place.has_value());
    CHECK(place->number == number);
    CHECK(place->nodes == nodes);
    CHECK(place->first_rank == first_rank);
    CHECK(place->world_size == world_size);
}

// Host 0's ranks would be asked to end, once, as a host has come.
void check_awaited(NodeMeeting& first) {
    bool awaited = false;
    for (int i = 0; i < 1000 && !awaited; ++i) {
        awaited = first.is_awaited();
        sleep_ms(awaited ? 0 : 10);
    }
    CHECK(awaited);
    CHECK(!first.is_awaited());
    CHECK(first.regroups());
}

}  // namespace

TEST_CASE("hosts with different numbers of ranks number them one after another, at each start") {
    const Hosts hosts(3, 3);
    const auto first = hosts.make(0, 1), second = hosts.make(1, 2), third = hosts.make(2, 3);
    for (int generation = 0; generation < 2; ++generation) {
        Found last = meet(*third), middle = meet(*second);
        const auto place = meet(*first).get();
        check_place(place, 0, 3, 0, 6);
        CHECK(place->most_ranks == 6);
        CHECK(place->master_port > 0);
        const auto of_second = middle.get(), of_third = last.get();
        check_place(of_second, 1, 3, 1, 6);
        check_place(of_third, 2, 3, 3, 6);
        CHECK(of_second->master_port == place->master_port);
        CHECK(of_third->master_port == place->master_port);
        CHECK(!first->is_awaited());
        CHECK(!second->regroups());
    }
    third->end();
    Found waits = meet(*second);
    expect_error(ExitCode::communication,
                 {"the job needs all 3 hosts, and the launcher of host 2 has ended"},
                 [&] { meet(*first).get(); });
    first->end();
    CHECK(!waits.get());
}

TEST_CASE("hosts come, leave, are lost and come again") {
    const Hosts hosts(1, 3);
    const auto first = hosts.make(0, 2);
    auto place = meet(*first).get();
    check_place(place, 0, 1, 0, 2);
    CHECK(place->most_ranks == 6);
    CHECK(!first->is_awaited());
    CHECK(!first->regroups());
    auto other = hosts.make(2, 1);
    for (const bool leaves : {true, false}) {
        Found comes = meet(*other);
        check_awaited(*first);
        check_place(meet(*first).get(), 0, 2, 0, 3);
        check_place(comes.get(), 1, 2, 2, 3);
        CHECK(!first->regroups());
        if (leaves) {
            other->leave();
            CHECK(first->regroups());
            other->end();
        }
        other.reset();  // lost, if it has not left
        check_place(meet(*first).get(), 0, 1, 0, 2);
        other = hosts.make(2, 1);
    }
}

TEST_CASE("a host's number is taken once, and who is asked to end waits for nobody") {
    const Hosts hosts(2, 2);
    const auto first = hosts.make(0, 1), second = hosts.make(1, 1), twin = hosts.make(1, 1);
    CHECK(!Hosts(2, 2).make(0, 1)->meet([](double) { return true; }));
    Found waits = await_meeting(*second);
    expect_error(ExitCode::usage, {"host 1 is already at tcp://"}, [&] { meet(*twin).get(); });
    first->end();
    CHECK(!waits.get());
}

TEST_CASE("launchers that were given different numbers of hosts do not wait for each other") {
    const int port = free_port();
    const auto first = Hosts(1, 2, port).make(0, 1);
    expect_error(
        ExitCode::communication,
        {"host 2 cannot join", "'gyre launch, nnodes 1:2', this one's 'gyre launch, nnodes 1:3'",
         "give all launchers the same `nnodes`"},
        [&] { Hosts(1, 3, port).make(2, 1); });
}

TEST_CASE("a host waits for a new launcher of host 0, and does not if the job needs all hosts") {
    for (const int most : {3, 2}) {
        const Hosts hosts(2, most);
        auto first = hosts.make(0, 2);
        const auto second = hosts.make(1, 1);
        Found comes = meet(*second);
        check_place(meet(*first).get(), 0, 2, 0, 3);
        check_place(comes.get(), 1, 2, 2, 3);
        first.reset();
        CHECK(!second->regroups());
        if (most == 2) {
            comes = meet(*second);
            expect_error(ExitCode::communication, {"host 0 at tcp://", "closed the connection"},
                         [&] { comes.get(); });
            continue;
        }
        comes = await_meeting(*second);
        first = hosts.make(0, 1);
        check_place(meet(*first).get(), 0, 2, 0, 2);
        check_place(comes.get(), 1, 2, 1, 2);
    }
}

TEST_CASE("a launcher that ends while it waits does not count, and may come again") {
    const Hosts hosts(2, 3);
    const auto first = hosts.make(0, 1);
    for (int i = 0; i < 2; ++i) {
        auto waits = hosts.make(1, 1);
        CHECK(!waits->meet([](double) { return true; }));
    }
    const auto second = hosts.make(1, 4);
    Found comes = meet(*second);
    check_place(meet(*first).get(), 0, 2, 0, 5);
    check_place(comes.get(), 1, 2, 1, 5);
}
