// No silent hang: ranks that stop, die or are slow, under mpirun. Each case has a time bound.
#include <filesystem>
#include <fstream>

#include "comm/flight_recorder.hpp"
#include "tests/catch.hpp"
#include "tests/gyre_process.hpp"
#include "tests/temp_dir.hpp"

using namespace gyre::test;

namespace {

// A training that would take minutes, with 3 ranks; on rank 1 the shell command `event`, in which
// $pid is that rank's process, runs beside it.
Outcome train_with(const TempDir& dir, const std::string& event, const std::string& flags) {
    make_dataset(dir.path() / "set", 600, 10, 1, 28, 28, 4);
    const std::string script = (dir.path() / "rank.sh").string();
    std::ofstream(script) << "pid=$$\nif [ \"$OMPI_COMM_WORLD_RANK\" = 1 ]; then (" << event
                          << ") & fi\nexec " << GYRE_BINARY << " train --data "
                          << (dir.path() / "set").string()
                          << " --threads 1 --epochs 100000 --no-eval --log-interval 1000000 "
                          << flags << "\n";
    return run_shell("timeout -k 1 60 " GYRE_MPIRUN " 3 sh " + script);
}

}  // namespace

TEST_CASE("a stopped rank ends the job at the deadline, and is named, once") {
    const TempDir dir;
    const std::string record = (dir.path() / "flight").string();
    const Outcome run =
        train_with(dir, "sleep 2; kill -STOP $pid", "--timeout 4 --flight-record " + record);
    INFO(run.output);
    CHECK(run.exit_code != 0);
    CHECK(run.seconds < 20);
    CHECK(count_of(run.output, "no progress for") == 1);
    for (const char* part : {"allreduce(fp32)", "step ", "bucket ", "rank 1 on ", "stopped",
                             "arrived: ranks 0, 2", "--timeout"}) {
        INFO(part);
        CHECK(count_of(run.output, part) >= 1);
    }
    // Rank 0's last collectives, the one it waited for among them.
    std::ifstream file(record + ".rank0.json");
    REQUIRE(file);
    const auto json = nlohmann::json::parse(file);
    CHECK(json.at("rank") == 0);
    CHECK(json.at("reason").get<std::string>().find("rank 1 on ") != std::string::npos);
    bool found = false;
    for (const auto& collective : json.at("collectives")) {
        found = found || (collective.at("state") == "waiting" && collective.at("step") >= 0);
    }
    CHECK(found);
}

TEST_CASE("a killed rank ends the job at once") {
    const TempDir dir;
    const Outcome run = train_with(dir, "sleep 2; kill -KILL $pid", "--timeout 30");
    INFO(run.output);
    CHECK(run.exit_code != 0);
    CHECK(run.seconds < 15);
    CHECK(count_of(run.output, "rank 1") >= 1);
}

TEST_CASE("a slow rank is named, and waited for") {
    const TempDir dir;
    // Stopped for longer than the warning's half of the deadline, and interrupted afterwards, so
    // that the training ends in its orderly way.
    const Outcome run = train_with(
        dir, "sleep 2; kill -STOP $pid; sleep 7; kill -CONT $pid; sleep 2; kill -INT $pid",
        "--timeout 12");
    INFO(run.output);
    CHECK(run.exit_code == 130);
    CHECK(count_of(run.output, "gyre: waiting for ") == 1);
    CHECK(count_of(run.output, "rank 1 on ") == 1);
    CHECK(count_of(run.output, "no progress") == 0);
}

TEST_CASE("the flight recorder keeps the last 256 collectives") {
    gyre::comm::FlightRecorder recorder;
    for (int i = 0; i < 300; ++i) {
        const auto number = recorder.start("allreduce(fp32)", 8 * i, i / 3, i % 3);
        CHECK(number == i);
        if (i < 298) {
            recorder.wait(number);
            REQUIRE(recorder.waiting());
            CHECK(recorder.waiting()->collective.number == i);
            recorder.finish(number);
        }
    }
    CHECK(!recorder.waiting());
    recorder.wait(298);
    const auto json = nlohmann::json::parse(recorder.json(2, 4, "a", "why"));
    CHECK(json.at("started") == 300);
    CHECK(json.at("finished") == 298);
    const auto& kept = json.at("collectives");
    REQUIRE(kept.size() == 256);
    CHECK(kept.front().at("number") == 44);
    CHECK(kept.back().at("state") == "started");
    CHECK(kept.at(254).at("state") == "waiting");
    CHECK(kept.at(253).at("state") == "finished");
    CHECK(kept.at(253).at("bytes") == 8 * 297);
    CHECK(kept.at(253).at("step") == 99);
}
