// No silent hang: ranks that stop, die or are slow, under mpirun. Each case has a time bound.
#include <chrono>
#include <filesystem>
#include <fstream>

#include "comm/flight_recorder.hpp"
#include "tests/catch.hpp"
#include "tests/gyre_process.hpp"
#include "tests/temp_dir.hpp"

using namespace gyre::test;

namespace {

struct Timed {
    Outcome outcome;
    double seconds;
};

// A training that would take minutes, with 3 ranks; on rank 1 the shell command `event`, in which
// $pid is that rank's process, runs beside it.
Timed train_with(const TempDir& dir, const std::string& event, const std::string& flags) {
    make_dataset(dir.path() / "set", 600, 10, 1, 28, 28, 4);
    const std::string script = (dir.path() / "rank.sh").string();
    std::ofstream(script) << "pid=$$\nif [ \"$OMPI_COMM_WORLD_RANK\" = 1 ]; then (" << event
                          << ") & fi\nexec " << GYRE_BINARY << " train --data "
                          << (dir.path() / "set").string()
                          << " --threads 1 --epochs 100000 --no-eval --log-interval 1000000 "
                          << flags << "\n";
    const auto begin = std::chrono::steady_clock::now();
    Timed result{run_shell("timeout -k 1 60 " GYRE_MPIRUN " 3 sh " + script), 0.0};
    result.seconds =
        std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    return result;
}

int count_of(const std::string& text, const std::string& part) {
    int count = 0;
    for (auto at = text.find(part); at != text.npos; at = text.find(part, at + 1)) {
        ++count;
    }
    return count;
}

}  // namespace

TEST_CASE("a stopped rank ends the job at the deadline, and is named, once") {
    const TempDir dir;
    const std::string record = (dir.path() / "flight").string();
    const Timed run =
        train_with(dir, "sleep 2; kill -STOP $pid", "--timeout 4 --flight-record " + record);
    INFO(run.outcome.output);
    CHECK(run.outcome.exit_code != 0);
    CHECK(run.seconds < 20);
    CHECK(count_of(run.outcome.output, "no progress for") == 1);
    for (const char* part : {"allreduce(fp32)", "step ", "bucket ", "rank 1 on ", "stopped",
                             "arrived: ranks 0, 2", "--timeout"}) {
        INFO(part);
        CHECK(count_of(run.outcome.output, part) >= 1);
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
    const Timed run = train_with(dir, "sleep 2; kill -KILL $pid", "--timeout 30");
    INFO(run.outcome.output);
    CHECK(run.outcome.exit_code != 0);
    CHECK(run.seconds < 15);
    CHECK(count_of(run.outcome.output, "rank 1") >= 1);
}

TEST_CASE("a slow rank is named, and waited for") {
    const TempDir dir;
    // Stopped for longer than the warning's half of the deadline, and interrupted afterwards, so
    // that the training ends in its orderly way.
    const Timed run = train_with(
        dir, "sleep 2; kill -STOP $pid; sleep 7; kill -CONT $pid; sleep 2; kill -INT $pid",
        "--timeout 12");
    INFO(run.outcome.output);
    CHECK(run.outcome.exit_code == 130);
    CHECK(count_of(run.outcome.output, "gyre: waiting for ") == 1);
    CHECK(count_of(run.outcome.output, "rank 1 on ") == 1);
    CHECK(count_of(run.outcome.output, "no progress") == 0);
}

TEST_CASE("the flight recorder keeps the last 256 collectives") {
    gyre::FlightRecorder recorder;
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
