// Starting without mpirun: ranks that find each other by flags and environments, over Gloo, and
// what a user sees where they do not.
#include <unistd.h>

#include <sys/stat.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <functional>

#include "base/host_name.hpp"
#include "tests/program/meeting.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/losses.hpp"
#include "tests/support/temp_dir.hpp"

using namespace gyre::test;

namespace {

struct Training {
    TempDir dir;
    std::string data, flags, compared;
    Training() : data((dir.path() / "set").string()) {
        make_dataset(data, 743, 100, 1, 28, 28, 10);
        // 743 = 12 * 60 + 23: the last batch is uneven.
        flags = "train --threads 1 --data " + data +
                " --global-batch 60 --seed 7 --lr 0.05 --bucket-kib 8 "
                "--log-interval 1 --init-timeout 60 ";
        compared = flags + "--epochs 2 --shards 4 ";
    }
    std::string file(const std::string& name) const { return (dir.path() / name).string(); }

    // Starts the ranks in this order, some time apart, and compares with the single rank's losses.
    void check(const std::string& method, int ranks, const std::vector<int>& order) {
        Jobs jobs;
        const std::string json = "ranks.jsonl";
        for (const int rank : order) {
            jobs.start(compared + "--metrics " + file(json) + " --init-method " + method +
                       " --rank " + std::to_string(rank) + " --world-size " +
                       std::to_string(ranks));
            sleep_ms(150);
        }
        compare(jobs.wait(), ranks, json);
    }
    void compare(const std::vector<Outcome>& outcomes, int ranks, const std::string& json) {
        for (const Outcome& outcome : outcomes) {
            INFO(outcome.output);
            REQUIRE(outcome.exit_code == 0);
        }
        if (one_.empty()) {
            const Outcome single = run_gyre(0, compared + "--metrics " + file("one.jsonl"));
            INFO(single.output);
            REQUIRE(single.exit_code == 0);
            one_ = step_losses(file("one.jsonl"));
            REQUIRE(one_.size() == 26);
        }
        CHECK(read_events(file(json), "start").at(0).at("ranks") == ranks);
        CHECK(step_losses(file(json)) == one_);
    }

 private:
    std::vector<double> one_;
};

// A shell's words that start ranks and kill them when a condition of the shell holds.
std::string killed_when(const std::vector<std::string>& ranks, const std::string& condition) {
    std::string words;
    for (const std::string& arguments : ranks) {
        words += gyre_command(0, arguments) + " & pids=\"$pids $!\"; ";
    }
    return words + "for i in $(seq 3000); do " + condition +
           " && break; sleep 0.02; done; kill -KILL $pids; wait";
}

}  // namespace

TEST_CASE("tcp://: any order of start, names and IPv6, and the single rank's losses") {
    Training training;
    training.check(tcp(free_port()), 2, {0, 1});
    training.check(tcp(free_port()), 4, {2, 1, 3, 0});
    training.check(tcp(free_port(), "localhost"), 2, {1, 0});
    training.check(tcp(free_port(), "[::1]"), 2, {1, 0});
}

TEST_CASE("file://: any order of start, and nothing is left behind") {
    Training training;
    const std::string path = training.file("meeting");
    training.check("file://" + path, 4, {2, 0, 3, 1});
    CHECK(!std::filesystem::exists(path));
    training.check("file://" + path, 2, {0, 1});  // so the same path does again
    CHECK(!std::filesystem::exists(path));
}

TEST_CASE("the environments of torchrun, of Slurm, and MASTER_ADDR by hand") {
    Training training;
    // `more`: flags of a rank.
    const auto check = [&](const std::function<std::string(int)>& environment,
                           const std::function<std::string(int)>& more = {}) {
        Jobs jobs;
        for (const int rank : {1, 0}) {
            jobs.start(training.compared + "--metrics " + training.file("env.jsonl") +
                           (more ? more(rank) : std::string()),
                       environment(rank));
        }
        training.compare(jobs.wait(), 2, "env.jsonl");
    };
    const std::string master =
        " MASTER_ADDR=localhost MASTER_PORT=" + std::to_string(free_port()) + " ";
    const auto number = [](int rank) { return std::to_string(rank); };
    check([&](int rank) { return "RANK=" + number(rank) + " WORLD_SIZE=2" + master; });
    // Flags count before the environment.
    check([&](int) { return "RANK=7 WORLD_SIZE=9" + master; },
          [&](int rank) { return " --init-method env:// --world-size 2 --rank " + number(rank); });
    check([&](int rank) {
        return "SLURM_PROCID=" + number(rank) +
               " SLURM_STEP_NUM_TASKS=2 SLURM_LOCALID=" + number(rank) +
               " SLURM_JOB_ID=" + number(getpid()) +
               " SLURM_STEP_ID=3 SLURM_STEP_NODELIST=localhost,other[1-3] ";
    });
    // torchrun's own store holds MASTER_PORT, and here another program the port after it.
    const Listener agent;
    check([&](int rank) {
        return "RANK=" + number(rank) + " WORLD_SIZE=2 LOCAL_RANK=" + number(rank) +
               " LOCAL_WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=" + number(agent.port - 1) +
               " TORCHELASTIC_RUN_ID=none TORCHELASTIC_USE_AGENT_STORE=True ";
    });
}

TEST_CASE("torchrun itself") {
    // Debian 12's (1.13, under Python 3.11) starts nothing at all.
    if (run_shell("timeout -k 1 60 torchrun --no_python --nproc_per_node 1 true").exit_code != 0) {
        WARN("skipped: no torchrun that works on the PATH");
        return;
    }
    Training training;
    Jobs jobs;
    for (const char* mode : {"", "--standalone"}) {
        jobs.start_shell("timeout -k 1 120 torchrun --no_python --nproc_per_node 2 " +
                         std::string(mode) + " " + gyre_command(0, training.compared) +
                         "--metrics " + training.file("torchrun.jsonl"));
        training.compare(jobs.wait(), 2, "torchrun.jsonl");
    }
}

TEST_CASE("ranks meet if they share a secret, and are told if theirs is another") {
    const TempDir dir;
    const std::string secret = "GYRE_SECRET=" + std::string(64, 'a');
    std::ofstream(dir.file("secret")) << std::string(64, 'A') << "\n";
    REQUIRE(chmod(dir.file("secret").c_str(), 0600) == 0);
    {
        const std::string method = tcp(free_port());
        Jobs jobs;
        jobs.start(rank_flags(method, 0, 2, "--init-timeout 20"), secret);
        jobs.start(rank_flags(method, 1, 2, "--init-timeout 20"),
                   "GYRE_SECRET_FILE=" + dir.file("secret"));
        for (const Outcome& outcome : jobs.wait()) {
            expect(outcome, 3, {"no-such-set"});  // they have met
        }
    }
    const std::string method = tcp(free_port());
    Jobs jobs;
    jobs.start(rank_flags(method, 0, 3, "--init-timeout 15"), secret);
    jobs.start(rank_flags(method, 1, 3, "--init-timeout 20"));
    jobs.start(rank_flags(method, 2, 3, "--init-timeout 20"),
               "GYRE_SECRET=" + std::string(64, 'b'));
    const auto outcomes = jobs.wait();
    expect(outcomes[0], 4, {"missing: ranks 1, 2"});
    expect(outcomes[1], 4, {"rank 1 cannot join", "has a secret, and this rank has none"});
    expect(outcomes[2], 4, {"rank 2 cannot join", "has another secret than this rank, or none"});
    const Outcome bad = run_shell("GYRE_SECRET=abc " + gyre_command(0, rank_flags(method, 0, 2)));
    expect(bad, 2, {"GYRE_SECRET: a secret has 64 hexadecimal digits"});
}

TEST_CASE("a meeting that other hosts reach needs a secret, or --insecure", "[words]") {
    const std::string everywhere = tcp(free_port(), "0.0.0.0");
    for (const int rank : {0, 1}) {
        const Outcome outcome = run_gyre(0, rank_flags(everywhere, rank, 2));
        expect(outcome, 4,
               {"which other hosts reach, without a secret", "GYRE_SECRET", "--insecure"});
    }
    expect(run_gyre(0, rank_flags(everywhere, 0, 2, "--init-timeout 1 --insecure")), 4,
           {"missing: rank 1", "without a secret: whoever reaches it can join or end this job"});
    expect(run_shell("GYRE_SECRET=" + std::string(64, 'c') + " " +
                     gyre_command(0, rank_flags(everywhere, 0, 2, "--init-timeout 1"))),
           4, {"missing: rank 1"});
    // An evaluation needs it, too.
    const std::string evaluated =
        "eval --data no-such-set --weights none --init-timeout 1 --world-size 2 --rank 0 "
        "--init-method ";
    expect(run_gyre(0, evaluated + everywhere), 4, {"without a secret", "--insecure"});
    expect(run_gyre(0, evaluated + everywhere + " --insecure"), 4, {"missing: rank 1"});
    // Ranks that the launcher has all put on one host meet at its loopback address.
    const std::string environment =
        "RANK=0 WORLD_SIZE=2 LOCAL_RANK=0 LOCAL_WORLD_SIZE=2 "
        "MASTER_ADDR=0.0.0.0 MASTER_PORT=" +
        std::to_string(free_port());
    expect(
        run_shell(environment + " " + gyre_command(0, "train --data no-such-set --init-timeout 1")),
        4, {"tcp://127.0.0.1:", "missing: rank 1"});
}

TEST_CASE("a rank that does not come is named at the deadline") {
    const std::string method = tcp(free_port());
    Jobs jobs;
    jobs.start(rank_flags(method, 0, 4));
    jobs.start(rank_flags(method, 2, 4));
    for (const Outcome& outcome : jobs.wait()) {
        expect(outcome, 4, {"2 of 4 ranks did not come", method, "missing: ranks 1, 3"});
    }
    // Without rank 0 there is no place to meet.
    expect(run_gyre(0, rank_flags(method, 1, 2)), 4, {"rank 1", method, "missing: rank 0"});
    const TempDir dir;
    const std::string file = "file://" + (dir.path() / "meeting").string();
    jobs.start(rank_flags(file, 0, 2));
    expect(jobs.wait().at(0), 4, {"missing: rank 1", file});
    CHECK(!std::filesystem::exists(dir.path() / "meeting"));
    expect(run_gyre(0, rank_flags(file, 1, 2)), 4, {"missing: rank 0"});
}

TEST_CASE("ranks that do not fit into the job are refused, and the job goes on") {
    Training training;
    const std::string method = tcp(free_port());
    const std::string common = training.compared + "--init-method " + method + " ";
    Jobs job;
    job.start(common + "--rank 0 --world-size 4 --metrics " + training.file("ranks.jsonl"));
    job.start(common + "--rank 1 --world-size 4");
    sleep_ms(500);
    expect(run_gyre(0, rank_flags(method, 2, 8)), 4, {"world size '8'", "'4'", method});
    expect(run_gyre(0, rank_flags(method, 1, 4)), 4, {"rank 1 is already at", "--rank"});
    expect(run_gyre(0, rank_flags(method, 2, 4, "--job-id b --init-timeout 2")), 4,
           {"another gyre job", "job id is ''", "'b'"});
    expect(run_gyre(0, rank_flags(method, 0, 4)), 4,
           {"cannot listen", method, "a gyre job already does", "another port"});
    job.start(common + "--rank 2 --world-size 4");
    job.start(common + "--rank 3 --world-size 4");
    training.compare(job.wait(), 4, "ranks.jsonl");
}

TEST_CASE("a second job on the port of a running one is refused") {
    Training training;
    const std::string method = tcp(free_port());
    const std::string common = training.flags + "--epochs 100000 --init-method " + method + " ";
    const std::string json = training.file("run.jsonl");
    Jobs job;
    const std::string pid = training.file("pid");
    job.start_shell("timeout --foreground 120 " + gyre_command(0, common) +
                    "--rank 0 --world-size 2 --metrics " + json + " & echo $! >" + pid +
                    "; wait $!");
    job.start(common + "--rank 1 --world-size 2");
    CHECK(run_shell("for i in $(seq 600); do grep -qs step " + json +
                    " && exit 0; sleep 0.05; done; exit 1")
              .exit_code == 0);
    expect(run_gyre(0, rank_flags(method, 0, 2)), 4, {"a gyre job already does"});
    expect(run_gyre(0, rank_flags(method, 1, 2)), 4, {"rank 1 is already at"});
    run_shell("kill -TERM $(cat " + pid + ")");
    // One rank was told to stop: both do, in order.
    for (const Outcome& outcome : job.wait()) {
        INFO(outcome.output);
        CHECK((outcome.exit_code == 130 || outcome.exit_code == 124));
    }
}

TEST_CASE("a stale file is recognised and refused") {
    const TempDir dir;
    const auto path = dir.path() / "meeting";
    const std::string method = "file://" + path.string();
    const auto has_come = [&](int rank) {
        return "[ -e " + path.string() + "/gyre.rank." + std::to_string(rank) + " ]";
    };
    // A job that is killed while it waits leaves its folder behind.
    run_shell(killed_when({rank_flags(method, 0, 2, "--init-timeout 60")}, has_come(0)));
    REQUIRE(std::filesystem::exists(path));
    Jobs jobs;
    jobs.start(rank_flags(method, 1, 2));
    jobs.start(rank_flags(method, 0, 2));
    const auto outcomes = jobs.wait();
    expect(outcomes[0], 4, {"rank 0", "stopped answering", "remove " + path.string()});
    expect(outcomes[1], 4, {"rank 0 is already at", "process ", "remove " + path.string()});
    // One that all its ranks had reached: what they left does not pass for an answer.
    std::filesystem::remove_all(path);
    std::vector<std::string> ranks;
    for (const int rank : {0, 1, 2}) {
        ranks.push_back(rank_flags(method, rank, 4, "--init-timeout 60"));
    }
    run_shell(killed_when(ranks, has_come(0) + " && " + has_come(1) + " && " + has_come(2)));
    expect(run_gyre(0, rank_flags(method, 2, 4)), 4, {"rank 2 is already at"});
}

TEST_CASE("an absurd number of ranks does not make the end of the start late") {
    const TempDir dir;
    for (const std::string& method : {tcp(free_port()), "file://" + dir.file("meeting")}) {
        const Outcome outcome = run_gyre(0, rank_flags(method, 0, 100'000'000));
        expect(outcome, 4, {"at least 16 of 100000000 ranks", "missing: ranks 1, 2, 3,"});
        CHECK(outcome.seconds < 10.0);
        CHECK(outcome.output.size() < 2000);
    }
}

TEST_CASE("what is not gyre, or cannot be listened on, is told apart") {
    const Listener silent;  // accepts and never says a word
    const std::string method = tcp(silent.port);
    expect(run_gyre(0, rank_flags(method, 1, 2)), 4, {"not gyre", method});
    expect(run_gyre(0, rank_flags(method, 0, 2)), 4, {"cannot listen", "not gyre"});
    expect(run_gyre(0, rank_flags(tcp(free_port(), "198.51.100.7"), 0, 2, "--insecure")), 4,
           {"cannot listen on 198.51.100.7", "address of this host"});
    expect(run_gyre(0, rank_flags(tcp(free_port(), "no.such.host.invalid"), 1, 2)), 4,
           {"no.such.host.invalid", "not found"});
}

TEST_CASE("flags that do not say enough, or contradict each other, are usage errors", "[words]") {
    const auto refuse = [](const std::string& flags, std::initializer_list<std::string> parts) {
        INFO(flags);
        expect(run_gyre(0, "train --data no-such-set " + flags), 2, parts);
    };
    refuse("--init-method tcp://localhost:4000", {"--rank", "--world-size"});
    refuse("--init-method tcp://localhost:4000 --rank 2 --world-size 2", {"rank 2 of 2"});
    refuse("--init-method tcp://localhost --rank 0 --world-size 2", {"tcp://192.0.2.1:22225"});
    refuse("--init-method tcp://::1:4000 --rank 0 --world-size 2", {"brackets"});
    refuse("--init-method tcp://localhost:port --rank 0 --world-size 2", {"'port' is not a port"});
    refuse("--init-method file://job --rank 0 --world-size 2", {"full path"});
    refuse("--init-method udp://localhost:4000", {"--init-method", "udp"});
    refuse("--comm mpi --init-method tcp://localhost:4000", {"--comm mpi"});
    refuse("--comm mpi --rank 0 --world-size 2", {"--rank", "MPI"});
    refuse("--comm carrier-pigeon", {"carrier-pigeon"});
    // A launcher's variables that say too little: never a rank that trains alone without a word.
    const auto refuse_environment = [](const std::string& environment,
                                       std::initializer_list<std::string> parts) {
        INFO(environment);
        const std::string all = environment + " MASTER_ADDR=127.0.0.1 ";
        expect(run_shell(all + gyre_command(0, "train --data no-such-set")), 4, parts);
    };
    refuse_environment("RANK=1", {"RANK is '1', WORLD_SIZE is not set", "--world-size", "unset"});
    refuse_environment("RANK=0 WORLD_SIZE=two", {"WORLD_SIZE is 'two'"});
    refuse_environment("RANK=0 WORLD_SIZE=0", {"WORLD_SIZE is '0'"});
    refuse_environment("RANK=2 WORLD_SIZE=1", {"RANK is '2', WORLD_SIZE is '1'"});
    refuse_environment("RANK=one WORLD_SIZE=2", {"RANK is 'one'"});
    const std::string torchrun =
        "TORCHELASTIC_RUN_ID=none TORCHELASTIC_USE_AGENT_STORE=True RANK=0 ";
    refuse_environment(torchrun + "MASTER_PORT=4000", {"torchrun", "WORLD_SIZE is not set"});
    refuse_environment(torchrun + "WORLD_SIZE=2 MASTER_PORT=65535",
                       {"MASTER_PORT 65535", "--master-port"});
    // Said even where the ranks cannot meet.
    expect(run_shell("RANK=0 WORLD_SIZE=2 " + gyre_command(0, "train --lr x")), 2, {"--lr"});
}

TEST_CASE("a killed rank ends the others with an error, within seconds") {
    Training training;
    for (const int ranks : {2, 3}) {
        const std::string common = training.flags + "--epochs 100000 --init-method " +
                                   tcp(free_port()) + " --world-size " + std::to_string(ranks) +
                                   " --rank ";
        const std::string json = training.file(std::to_string(ranks) + ".jsonl");
        Jobs jobs;
        for (int rank = 0; rank + 1 < ranks; ++rank) {
            jobs.start(common + std::to_string(rank) + (rank == 0 ? " --metrics " + json : ""));
        }
        run_shell(killed_when({common + std::to_string(ranks - 1)}, "grep -qs step " + json));
        const auto start = std::chrono::steady_clock::now();
        // Each says it on its own terminal, and which rank it was: not who noticed it first.
        for (const Outcome& outcome : jobs.wait()) {
            expect(outcome, 4, {"its process has ended"});
            const auto named = [&](int rank) {
                return count_of(outcome.output, "rank " + std::to_string(rank) + " on " +
                                                    gyre::host_name() + " (its process");
            };
            CHECK(named(ranks - 1) == 1);
            CHECK(named(0) + (ranks > 2 ? named(1) : 0) == 0);
        }
        const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
        CHECK(seconds.count() < 20.0);
    }
}

TEST_CASE("ranks that differ say so on each terminal") {
    Training training;
    const std::string common =
        training.flags + "--init-method " + tcp(free_port()) + " --world-size 2 ";
    Jobs jobs;
    jobs.start(common + "--rank 0 --momentum 0.25");
    jobs.start(common + "--rank 1 --momentum 0.75");
    for (const Outcome& outcome : jobs.wait()) {
        expect(outcome, 4, {"flag --momentum differs", "0.75"});
    }
}
