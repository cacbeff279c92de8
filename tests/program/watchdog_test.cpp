// No silent hang: ranks that stop, die or are slow, under mpirun. Each case has a time bound.
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <thread>

#include "comm/launch/start_alarm.hpp"
#include "comm/reducer.hpp"
#include "comm/watch/flight_recorder.hpp"
#include "comm/watch/link.hpp"
#include "comm/watch/watchdog.hpp"
#include "kernels/make_backend.hpp"
#include "tests/program/gyre_process.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/communicators.hpp"
#include "tests/support/temp_dir.hpp"

using namespace gyre::test;

namespace {

// A training that would take minutes, with 3 ranks; on rank 1 the shell command `event`, in which
// $pid is that rank's process, runs beside it once the ranks train. Its seconds count from there:
// a busy machine may take its time until then.
Outcome train_with(const TempDir& dir, const std::string& event, const std::string& flags) {
    make_dataset(dir.path() / "set", 600, 10, 1, 28, 28, 4);
    const std::string script = (dir.path() / "rank.sh").string();
    const auto begun = dir.path() / "begun", progress = dir.path() / "progress.jsonl";
    std::ofstream(script)
        << "pid=$$\nif [ \"$OMPI_COMM_WORLD_RANK\" = 1 ]; then (\n"
        << "until grep -qs '\"event\":\"epoch\"' " << progress.string()
        << "; do kill -0 $pid || exit; sleep 0.1; done; : >" << begun.string() << "; " << event
        << ") & fi\nexec " << gyre_binary() << " train --data " << (dir.path() / "set").string()
        << " --threads 1 --epochs 100000 --no-eval --log-interval 1000000 --metrics "
        << progress.string() << " " << flags << "\n";
    Outcome run = run_shell("timeout -k 1 90 " GYRE_MPIRUN " 3 sh " + script);
    const auto end = std::filesystem::file_time_type::clock::now();
    INFO(run.output);
    REQUIRE(std::filesystem::exists(begun));
    run.seconds =
        std::chrono::duration<double>(end - std::filesystem::last_write_time(begun)).count();
    return run;
}

}  // namespace

TEST_CASE("a stopped rank ends the job at the deadline, and is named, once") {
    const TempDir dir;
    const std::string record = (dir.path() / "flight").string();
    const Outcome run = train_with(dir, "kill -STOP $pid", "--timeout 4 --flight-record " + record);
    INFO(run.output);
    CHECK(run.exit_code != 0);
    CHECK(run.seconds < 60);
    CHECK(count_of(run.output, "no progress for") == 1);
    for (const char* part :
         {"allreduce(fp32)", "step ", "bucket ", "rank 1 on ", "stopped", "--timeout"}) {
        INFO(part);
        CHECK(count_of(run.output, part) >= 1);
    }
    // Rank 1 and nobody else. Who has arrived depends on the moment: stopped within a reduction,
    // rank 1 has arrived itself; in a ring's last round it may have let rank 0 go on and not
    // rank 2.
    CHECK(count_of(run.output, "not answering or not arrived: rank 1 on ") >= 1);
    CHECK(count_of(run.output, "not answering or not arrived: rank 0 on ") == 0);
    // Rank 0's last collectives, the one it waited for among them.
    std::ifstream file(record + ".rank0.json");
    REQUIRE(file);
    using std::filesystem::perms;
    CHECK(std::filesystem::status(record + ".rank0.json").permissions() ==
          (perms::owner_read | perms::owner_write));
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
    const Outcome run = train_with(dir, "kill -KILL $pid", "--timeout 30");
    INFO(run.output);
    CHECK(run.exit_code != 0);
    CHECK(run.seconds < 25);
    CHECK(count_of(run.output, "rank 1") >= 1);
}

TEST_CASE("a rank that is stopped before MPI has started ends the job, and is named") {
    const TempDir dir;
    const std::string script = (dir.path() / "rank.sh").string();
    std::ofstream(script) << "[ \"$OMPI_COMM_WORLD_RANK\" = 1 ] && kill -STOP $$\nexec "
                          << gyre_binary() << " train --data no-such-set --init-timeout 3\n";
    const Outcome run = run_shell("timeout -k 1 90 " GYRE_MPIRUN " 3 sh " + script);
    INFO(run.output);
    CHECK(run.exit_code == 4);
    // Once, unless the launcher is slow to end the others.
    CHECK(count_of(run.output, "within --init-timeout (3 s)") >= 1);
    CHECK(count_of(run.output, "rank 1 on ") >= 1);
    CHECK(count_of(run.output, "is stopped") >= 1);
}

TEST_CASE("a process that stood still before its deadline says so, and who is missing") {
    struct Missing final : gyre::comm::StartNews {
        explicit Missing(int called_) : called(called_) {}
        News news(bool last) override {
            const bool told = write(called, "", 1) == 1;
            return {"", told && last ? "rank 1 is missing" : ""};
        }
        int called;
    };
    int calls[2], text[2];
    REQUIRE(pipe(calls) == 0);
    REQUIRE(pipe(text) == 0);
    const pid_t child = fork();
    REQUIRE(child >= 0);
    if (child == 0) {
        dup2(text[1], STDERR_FILENO);
        gyre::comm::StartAlarm alarm(5.0);
        alarm.watch(0, 0.0, true, std::make_unique<Missing>(calls[1]));
        std::this_thread::sleep_for(std::chrono::seconds(60));
        std::_Exit(0);
    }
    close(text[1]);
    char byte = 0;
    REQUIRE(read(calls[0], &byte, 1) == 1);
    std::this_thread::sleep_for(std::chrono::milliseconds(100));  // it sleeps between its calls
    kill(child, SIGSTOP);
    std::this_thread::sleep_for(std::chrono::seconds(2));
    kill(child, SIGCONT);
    std::string said(1000, '\0');
    const ssize_t bytes = read(text[0], said.data(), said.size());
    said.resize(bytes > 0 ? static_cast<std::size_t>(bytes) : 0);
    int status = 0;
    REQUIRE(waitpid(child, &status, 0) == child);
    INFO(said);
    CHECK(WEXITSTATUS(status) == 4);
    CHECK(count_of(said, "; this process itself stood still for ") == 1);
    CHECK(count_of(said, " s; rank 1 is missing. Ending") == 1);
    for (const int end : {calls[0], calls[1], text[0]}) {
        close(end);
    }
}

namespace {

// Rank 1 of 2, whose set-up or collectives last so many seconds.
class Stuck final : public gyre::test::OneOfTwo {
 public:
    explicit Stuck(double set_up, double collective = 0.0)
        : OneOfTwo(1), set_up_(set_up), collective_(collective) {}
    bool use_device(gyre::Device& device) override {
        std::this_thread::sleep_for(set_up_);
        return device.host_memory();
    }
    std::unique_ptr<gyre::comm::Request> start(const gyre::comm::Collective&) override {
        return std::make_unique<Late>(collective_);
    }

 private:
    using Seconds = std::chrono::duration<double>;
    struct Late final : gyre::comm::Request {
        explicit Late(Seconds after_) : after(after_) {}
        void wait() override { std::this_thread::sleep_for(after); }
        Seconds after;
    };
    Seconds set_up_, collective_;
};

// The exit code of a process that does this, and 0 where it comes to its end.
int exit_code_of(const std::function<void()>& work) {
    const pid_t child = fork();
    REQUIRE(child >= 0);
    if (child == 0) {
        work();
        std::_Exit(0);
    }
    int status = 0;
    REQUIRE(waitpid(child, &status, 0) == child);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

int set_up_for(double seconds, double timeout, double setup_timeout) {
    return exit_code_of([&] {
        const auto backend = gyre::make_cpu_backend(1);
        const auto comm = gyre::comm::make_watched_communicator(
            std::make_unique<Stuck>(seconds), {timeout, timeout / 2, {}, setup_timeout});
        comm->use_device(*backend);
    });
}

}  // namespace

TEST_CASE("the set-up of reductions has a deadline of its own") {
    CHECK(set_up_for(1.5, 0.5, 30.0) == 0);   // longer than any other wait may last
    CHECK(set_up_for(10.0, 30.0, 0.5) == 4);  // and no longer than its own
}

TEST_CASE("a sum within a pass that does not end is named, with its step") {
    const TempDir dir;
    const std::string record = (dir.path() / "flight").string();
    const int exit_code = exit_code_of([&] {
        const auto device = gyre::make_cpu_backend(1);
        const auto comm = gyre::comm::make_watched_communicator(
            std::make_unique<Stuck>(0.0, 30.0),
            {.timeout_seconds = 0.5, .warning_seconds = 0.25, .flight_record = record});
        std::vector<float> gradients(16), values(300);
        gyre::comm::Reducer reducer(*comm, *device, {{0, 16}}, gradients.data());
        reducer.begin_step();
        reducer.sum({values.data(), 300});
    });
    CHECK(exit_code == 4);
    const auto json = nlohmann::json::parse(std::ifstream(record + ".rank1.json"));
    CHECK(count_of(json.at("reason"), "allreduce(fp32) of 1200 bytes (step 1, statistics 0)") == 1);
    const auto& last = json.at("collectives").back();
    CHECK(last.at("state") == "waiting");
    CHECK(last.at("step") == 0);
    CHECK(last.at("statistics") == 0);
}

TEST_CASE("a slow rank is named, and waited for") {
    const TempDir dir;
    // Stopped for longer than the warning's half of the deadline, and interrupted afterwards, so
    // that the training ends in its orderly way.
    const Outcome run = train_with(
        dir, "kill -STOP $pid; sleep 7; kill -CONT $pid; sleep 2; kill -INT $pid", "--timeout 12");
    INFO(run.output);
    CHECK(run.exit_code == 130);
    CHECK(count_of(run.output, "gyre: waiting for ") == 1);
    CHECK(count_of(run.output, "rank 1 on ") == 1);
    CHECK(count_of(run.output, "no progress") == 0);
}

TEST_CASE("the flight recorder keeps the last 256 collectives") {
    gyre::comm::FlightRecorder recorder;
    for (int i = 0; i < 300; ++i) {
        const auto number = recorder.start(
            {.name = "allreduce(fp32)", .bytes = 8 * i, .origin = {i / 3, "bucket", i % 3}});
        CHECK(number == i);
        if (i < 298) {
            recorder.wait(number);
            REQUIRE(recorder.waiting());
            CHECK(recorder.waiting()->entry.number == i);
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
    CHECK(kept.at(253).at("bucket") == 0);
}

// A rank that ends with something unread resets the connection.
TEST_CASE("the last news of a rank that has ended arrive, whatever was sent to it") {
    std::uint16_t port = 0;
    const gyre::comm::Socket listener = gyre::comm::listen_at("127.0.0.1", port);
    REQUIRE(listener.open());
    const auto seal = [](bool server) { return gyre::comm::Seal({}, "link", server); };
    gyre::comm::Link here(gyre::comm::connect_to("127.0.0.1", port, 2000), seal(false));
    REQUIRE(here.open());
    gyre::comm::Link there(gyre::comm::Socket(accept(listener.fd(), nullptr, nullptr)), seal(true));
    REQUIRE(there.open());
    const std::int64_t question = 1, news = 17;
    here.send(&question, sizeof question);
    there.send(&news, sizeof news);
    there.close();
    here.send(&question, sizeof question);
    here.send(&question, sizeof question);
    std::int64_t heard = 0;
    CHECK(here.receive(&heard, sizeof heard));
    CHECK(heard == news);
    CHECK_FALSE(here.receive(&heard, sizeof heard));
    CHECK_FALSE(here.open());
}
