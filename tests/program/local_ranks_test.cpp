// gyre launch: ranks of this host, without mpirun.
#include <chrono>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <future>
#include <iterator>
#include <random>
#include <thread>
#include <vector>

#include "tests/program/gyre_process.hpp"
#include "tests/program/meeting.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/losses.hpp"
#include "tests/support/temp_dir.hpp"

using namespace gyre::test;
namespace fs = std::filesystem;

namespace {

struct Job {
    TempDir dir;
    std::string base;
    Job() {
        make_dataset(dir.path() / "set", 60, 12, 1, 28, 28, 3);
        base = "train --threads 1 --log-interval 1 --batch-size 5 --data " + file("set") + " ";
    }
    std::string file(const std::string& name) const { return dir.file(name); }
    std::string bytes(const std::string& name) const { return file_bytes(file(name)); }
    // When the last checkpoint was saved.
    fs::file_time_type saved() const {
        std::error_code error;
        return fs::last_write_time(file("run/last.safetensors"), error);
    }
    // In the background, until the second epoch has begun; `then` is a shell's, and knows the
    // launcher as $job.
    Outcome launched(int ranks, const std::string& flags, const std::string& then,
                     int timeout = 20) const {
        const std::string json = file("log");
        fs::remove(json);
        return run_shell(
            gyre_binary() + " launch -n " + std::to_string(ranks) + " -- " + base +
            "--epochs 90000 --timeout " + std::to_string(timeout) + " --metrics " + json + " " +
            flags + " & job=$!; for i in $(seq 1200); do grep -qs '\"epoch\":2' " + json +
            " && break; sleep 0.05; done; ranks=$(cat /proc/$job/task/$job/children); " + then +
            "; wait $job; code=$?; "
            "left() { for r in $ranks; do grep -s State: /proc/$r/status; done | grep -vc Z; }; "
            "for i in $(seq 40); do [ $(left) = 0 ] && break; sleep 0.05; done; "
            "echo ranks: $(echo $ranks | wc -w), left: $(left); exit $code");
    }
};

// Waits for what is to come within two minutes.
template <class Condition>
bool await(Condition condition) {
    const auto begin = std::chrono::steady_clock::now();
    while (!condition()) {
        if (std::chrono::steady_clock::now() - begin > std::chrono::minutes(2)) {
            return false;
        }
        std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    return true;
}

// A launcher that runs in the background, with its output in a file.
class BackgroundLauncher {
 public:
    // pause: milliseconds that each file of a checkpoint takes.
    BackgroundLauncher(const Job& job, const std::string& name, const std::string& words,
                       int pause = 60)
        : log_(job.file(name + ".log")) {
        const std::string pid = job.file(name + ".pid");
        fs::remove(pid);
        outcome_ =
            std::async(std::launch::async, run_shell,
                       "export GYRE_TEST_WRITE_PAUSE_MS=" + std::to_string(pause) + "; " +
                           gyre_binary() + " " + words + " > " + log_ + " 2>&1 & echo $! > " + pid +
                           ".new; mv " + pid + ".new " + pid + "; wait $!");
        REQUIRE(await([&] { return fs::exists(pid); }));
        std::ifstream(pid) >> process_;
    }
    ~BackgroundLauncher() {
        if (outcome_.valid()) {
            signal(SIGKILL);
        }
    }
    BackgroundLauncher(const BackgroundLauncher&) = delete;
    BackgroundLauncher& operator=(const BackgroundLauncher&) = delete;
    std::vector<pid_t> ranks() const {
        const std::string number = std::to_string(process_);
        std::ifstream children("/proc/" + number + "/task/" + number + "/children");
        return {std::istream_iterator<pid_t>(children), {}};
    }
    void signal(int number) const { kill(process_, number); }
    bool says(const std::string& text, int times) const {
        return await([&] { return count_of(file_bytes(log_), text) >= times; });
    }
    int exit_code() { return outcome_.get().exit_code; }
    std::string log() const { return file_bytes(log_); }

 private:
    const std::string log_;
    std::future<Outcome> outcome_;
    pid_t process_ = 0;
};

}  // namespace

TEST_CASE("gyre launch trains as the same ranks do that were started by hand") {
    const Job job;
    const std::string flags = job.base + "--epochs 1 ";
    const Outcome launched =
        run_gyre(0, "launch -n 2 -- " + flags + "--save " + job.file("launched"));
    INFO(launched.output);
    REQUIRE(launched.exit_code == 0);
    CHECK(count_of(launched.output, "[0] epoch 1/1  step ") == 6);
    CHECK(count_of(launched.output, "2 ranks of batch 5") == 1);
    const std::string by_hand = gyre_binary() + " " + flags + "--save " + job.file("by-hand") +
                                " --init-method file://" + job.file("meeting") +
                                " --world-size 2 --rank ";
    CHECK(run_shell(by_hand + "1 & " + by_hand + "0 && wait $!").exit_code == 0);
    REQUIRE(!job.bytes("by-hand/last.safetensors").empty());
    CHECK(job.bytes("launched/last.safetensors") == job.bytes("by-hand/last.safetensors"));
    // Every rank's lines have its number; what follows the last end of a line comes, too.
    const Outcome errors = run_shell(
        gyre_binary() + " launch --nproc-per-node 3 -- train -v --data " + job.file("none"));
    INFO(errors.output);
    CHECK(errors.exit_code == 3);
    CHECK(count_of(errors.output, "[0] gyre: ") == 1);
    CHECK(count_of(errors.output, "gyre: ") == 1);
}

TEST_CASE("gyre launch ends all ranks where one fails, and says which") {
    const Job job;
    const Outcome killed = job.launched(3, "", "set -- $ranks; kill -KILL $3");
    INFO(killed.output);
    CHECK(killed.exit_code == 128 + SIGKILL);
    CHECK(killed.seconds < 30);
    CHECK(count_of(killed.output, "rank 2 was ended by signal 9") == 1);
    CHECK(count_of(killed.output, "ranks: 3, left: 0") == 1);

    // Also if the others have ended before it looks, as on a busy machine.
    const Outcome late = job.launched(
        3, "",
        "kill -STOP $job; set -- $ranks; kill -KILL $3; for process in $ranks; do until [ \"$(cut "
        "-d ' ' -f 3 /proc/$process/stat)\" = Z ]; do sleep 0.05; done; done; kill -CONT $job");
    INFO(late.output);
    CHECK(late.exit_code == 128 + SIGKILL);
    CHECK(count_of(late.output, "rank 2 was ended by signal 9") == 1);

    // No rank outlives it for long, nor the folder they have met in.
    fs::create_directory(job.file("tmp"));
    setenv("TMPDIR", job.file("tmp").c_str(), 1);
    const Outcome alone = job.launched(2, "", "kill -KILL $job");
    unsetenv("TMPDIR");
    INFO(alone.output);
    CHECK(count_of(alone.output, "ranks: 2, left: 0") == 1);
    const auto begin = std::chrono::steady_clock::now();
    while (!fs::is_empty(job.file("tmp")) &&
           std::chrono::steady_clock::now() - begin < std::chrono::seconds(20)) {
        std::this_thread::sleep_for(std::chrono::milliseconds(20));
    }
    CHECK(fs::is_empty(job.file("tmp")));
}

TEST_CASE("a stopped rank does not keep gyre launch from ending") {
    const Job job;
    const Outcome stopped = job.launched(2, "", "set -- $ranks; kill -STOP $2", 3);
    INFO(stopped.output);
    CHECK(stopped.exit_code == 4);
    CHECK(count_of(stopped.output, "rank 1 is stopped while another has failed: killed") == 1);
    CHECK(count_of(stopped.output, "told to end") == 0);
    CHECK(count_of(stopped.output, "ranks: 2, left: 0") == 1);
}

TEST_CASE("a rank that is writing a checkpoint ends soon after another was killed") {
    const Job job;
    const std::string draft = job.file("run/last.safetensors.gyre.tmp");
    const Outcome killed = run_shell(
        "export GYRE_TEST_WRITE_PAUSE_MS=2000; " + gyre_binary() + " launch -n 2 -- " + job.base +
        "--epochs 90000 --save-every 1steps --save " + job.file("run") +
        " & job=$!; for i in $(seq 1200); do [ -e " + draft +
        " ] && break; sleep 0.05; done; set -- $(cat /proc/$job/task/$job/children); sleep 1; "
        "kill -KILL $2; at=$(date +%s%N); wait $job; code=$?; "
        "[ $(($(date +%s%N) - at)) -lt 6000000000 ] && echo soon; exit $code");
    INFO(killed.output);
    CHECK(killed.exit_code == 128 + SIGKILL);
    CHECK(count_of(killed.output, "gyre: rank 0 on ") == 1);
    CHECK(count_of(killed.output, "gone: rank 1 on ") == 1);
    CHECK(count_of(killed.output, "soon") == 1);
}

TEST_CASE("gyre launch passes signals on to its ranks") {
    const Job job;
    const Outcome stopped = job.launched(2, "--save " + job.file("run"), "kill -TERM $job");
    INFO(stopped.output);
    CHECK(stopped.exit_code == 130);
    CHECK(count_of(stopped.output, "interrupted: all ranks stopped after the same step") == 1);
    CHECK(count_of(stopped.output, "ranks: 2, left: 0") == 1);
    CHECK(!job.bytes("run/last.safetensors").empty());
    // Two that come together, as timeout(1) sends them, are one.
    const Outcome twice =
        job.launched(2, "--save " + job.file("twice"),
                     "kill -STOP $job; kill -TERM $job; kill -INT $job; kill -CONT $job");
    INFO(twice.output);
    CHECK(twice.exit_code == 130);
    CHECK(count_of(twice.output, "interrupted: all ranks stopped after the same step") == 1);
    CHECK(!job.bytes("twice/last.safetensors").empty());
}

TEST_CASE("gyre launch starts all ranks again where one was killed, and the training resumes") {
    const Job job;
    const std::string train = job.base + "--epochs 3 --optimizer adam --save ";
    REQUIRE(run_gyre(0, "launch -n 2 -- " + train + job.file("whole")).exit_code == 0);
    // Rank 1 is killed after the first checkpoint; each takes seconds to write.
    const std::string last = job.file("run/last.safetensors");
    const Outcome restarted =
        run_shell("export GYRE_TEST_WRITE_PAUSE_MS=60; " + gyre_binary() +
                  " launch -n 2 --max-restarts 1 -- " + train + job.file("run") +
                  " --resume auto & job=$!; for i in $(seq 6000); do [ -e " + last +
                  " ] && break; sleep 0.02; done; set -- $(cat /proc/$job/task/$job/children); "
                  "kill -KILL $2; wait $job");
    INFO(restarted.output);
    CHECK(restarted.exit_code == 0);
    CHECK(count_of(restarted.output, "exit code 137; all ranks start again in ") == 1);
    CHECK(count_of(restarted.output, "resumed from " + job.file("run") + ": epoch ") == 1);
    CHECK(run_gyre(0, "diff " + job.file("whole") + " " + job.file("run")).exit_code == 0);
}

TEST_CASE("gyre launch on each of two hosts trains as on one, and both start again together") {
    const Job job;
    const std::string train = job.base + "--epochs 3 --optimizer adam --save ";
    REQUIRE(run_gyre(0, "launch -n 4 -- " + train + job.file("one")).exit_code == 0);
    // Both are this host; they meet at a port instead of in a folder.
    const auto launch = [&](const std::string& flags) {
        const std::string port = std::to_string(free_port());
        return [=](int node) {
            return gyre_binary() + " launch -n 2 --nnodes 2 --node-rank " + std::to_string(node) +
                   " --master-addr 127.0.0.1 --master-port " + port + " " + flags;
        };
    };
    const auto plain = launch("-- " + train + job.file("two"));
    const Outcome two = run_shell(plain(1) + " & other=$!; " + plain(0) + " || exit; wait $other");
    INFO(two.output);
    CHECK(two.exit_code == 0);
    CHECK(count_of(two.output, "4 ranks of batch 5") == 1);
    CHECK(!job.bytes("one/last.safetensors").empty());
    CHECK(job.bytes("two/last.safetensors") == job.bytes("one/last.safetensors"));

    // Rank 3 is killed after the first checkpoint.
    const std::string last = job.file("run/last.safetensors");
    const auto again = launch("--max-restarts 3 -- " + train + job.file("run") + " --resume auto");
    const Outcome killed = run_shell(
        "export GYRE_TEST_WRITE_PAUSE_MS=60; " + again(1) + " > " + job.file("log") +
        " 2>&1 & other=$!; (for i in $(seq 6000); do [ -e " + last +
        " ] && break; sleep 0.02; done; set -- $(cat /proc/$other/task/$other/children); "
        "kill -KILL $2) & " +
        again(0) + "; code=$?; wait $other || code=$?; cat " + job.file("log") + "; exit $code");
    INFO(killed.output);
    CHECK(killed.exit_code == 0);
    CHECK(count_of(killed.output, "gyre launch: rank 3 was ended by signal 9") == 1);
    CHECK(count_of(killed.output, "(restart 1 of 3)") == 2);
    CHECK(run_gyre(0, "diff " + job.file("one") + " " + job.file("run")).exit_code == 0);
}

TEST_CASE("a job trains on without a host that is lost or leaves, and with one that comes") {
    const Job job;
    // Its checkpoints take so long that all of this comes before the end.
    const std::string train = " -- " + job.base +
                              "-q --epochs 200 --optimizer adam --timeout 6 --resume auto "
                              "--save-every 5epochs --save ";
    REQUIRE(run_gyre(0, "launch -n 4" + train + job.file("whole")).exit_code == 0);
    const std::string port = std::to_string(free_port());
    const auto launch = [&](int node) {
        return "launch -n 2 --nnodes 1:2 --node-rank " + std::to_string(node) +
               " --master-addr 127.0.0.1 --master-port " + port +
               " --rejoin-timeout 1 --max-restarts 5" + train + job.file("run");
    };
    const std::string both = "2 of 2 hosts train, with 4 ranks: host 0, 1\n";
    const std::string alone = "1 of 2 hosts train, with 2 ranks: host 0; without host 1\n";
    const auto saves = [&] {
        return await([&, before = job.saved()] { return job.saved() != before; });
    };
    auto first = std::make_unique<BackgroundLauncher>(job, "first", launch(0));
    {
        BackgroundLauncher lost(job, "lost", launch(1));
        CHECK(first->says(both, 1));
        CHECK(saves());
        lost.signal(SIGKILL);
        CHECK(first->says(alone, 1));
        CHECK(lost.exit_code() == 128 + SIGKILL);
    }
    CHECK(saves());
    {
        BackgroundLauncher leaves(job, "leaves", launch(1));
        CHECK(first->says(both, 2));
        CHECK(saves());
        CHECK(count_of(first->log(), "all ranks start again") == 1);
        // Host 0 is lost and started again.
        first->signal(SIGKILL);
        CHECK(first->exit_code() == 128 + SIGKILL);
        CHECK(leaves.says("gyre launch: waiting for host 0 for up to 600 s: ", 1));
        first = std::make_unique<BackgroundLauncher>(job, "again", launch(0));
        CHECK(first->says(both, 1));
        CHECK(saves());
        leaves.signal(SIGTERM);
        CHECK(first->says(alone, 1));
        CHECK(leaves.exit_code() == 130);
        INFO(leaves.log());
        CHECK(count_of(leaves.log(), "all ranks start again") == 1);
    }
    CHECK(saves());
    first->signal(SIGTERM);
    const int code = first->exit_code();
    INFO(first->log());
    CHECK(code == 130);
    CHECK(count_of(first->log(), "all ranks start again") == 0);
    // Three ranks of one host end what two and four of two have begun.
    CHECK(run_gyre(0, "launch -n 3" + train + job.file("run")).exit_code == 0);
    CHECK(run_gyre(0, "diff " + job.file("whole") + " " + job.file("run")).exit_code == 0);
}

TEST_CASE("a job whose ranks are killed again and again ends as one that was left alone") {
#if defined(GYRE_SANITIZED)
    constexpr int kKills = 4;
#else
    constexpr int kKills = 8;
#endif
    constexpr int kRanks = 3, kEpochs = 25 * kKills;
    const Job job;
    // Far more checkpoints than kills, each of which waits for another one; and each takes so long
    // that all kills come well before the end, even if this process has to wait for a processor.
    const std::string train = job.base + "-q --epochs " + std::to_string(kEpochs) +
                              " --virtual-ranks 4 --optimizer adam --timeout 6 "
                              "--save-every 5epochs --save ";
    REQUIRE(run_gyre(0, "launch -n 3 -- " + train + job.file("whole") + " --metrics " +
                            job.file("whole.jsonl"))
                .exit_code == 0);
    BackgroundLauncher launcher(job, "disturbed",
                                "launch -n 3 --max-restarts 50 -- " + train + job.file("run") +
                                    " --resume auto --metrics " + job.file("run.jsonl"),
                                12);
    std::mt19937 random(std::random_device{}());
    const auto any = [&](int below) { return static_cast<int>(random() % unsigned(below)); };
    auto seen = job.saved();
    std::vector<pid_t> before;
    int kills = 0;
    for (; kills < kKills; ++kills) {
        std::vector<pid_t> ranks;
        const bool in_start_up = kills == 2 || kills == 5;
        const bool come = await([&] {
            ranks = launcher.ranks();
            return ranks.size() == kRanks && ranks != before &&
                   (in_start_up || job.saved() != seen);
        });
        if (!come) {
            break;
        }
        sleep_ms(any(20));
        const int first = any(kRanks);
        kill(ranks[static_cast<std::size_t>(first)], kills == 3 ? SIGSTOP : SIGKILL);
        if (kills % 4 == 1) {  // and another
            kill(ranks[static_cast<std::size_t>((first + 1) % kRanks)], SIGKILL);
        }
        before = ranks;
        await([&] { return launcher.ranks() != ranks; });
        seen = job.saved();
    }
    const int code = launcher.exit_code();
    INFO(launcher.log());
    CHECK(code == 0);
    CHECK(kills == kKills);
    CHECK(count_of(launcher.log(), "all ranks start again") >= kKills);
    CHECK(count_of(launcher.log(), "is stopped while another has failed: killed") >= 1);
    CHECK(logged_losses(job.file("run.jsonl")).size() == kEpochs * 3);
    CHECK(logged_losses(job.file("run.jsonl")) == logged_losses(job.file("whole.jsonl")));
    const auto hashes = read_events(job.file("run/receipt.jsonl"), "state");
    CHECK(hashes.size() == kEpochs);
    CHECK(hashes == read_events(job.file("whole/receipt.jsonl"), "state"));
    for (const char* name : {"last.safetensors", "best.safetensors"}) {
        INFO(name);
        CHECK(run_gyre(0, "diff " + job.file("whole/") + name + " " + job.file("run/") + name)
                  .exit_code == 0);
    }
}

TEST_CASE("--save-every of seconds saves within an epoch, after the same step of all ranks") {
    const TempDir dir;
    make_dataset(dir.path() / "set", 12000, 12, 1, 28, 28, 3);
    const std::string train =
        " launch -n 2 -- train --threads 1 --model resnet --batch-size 5 "
        "--epochs 1 --no-eval --data " +
        dir.file("set") + " --save " + dir.file("run");
    const Outcome killed = run_shell(
        gyre_binary() + train + " --save-every 1s -q & job=$!; for i in $(seq 1200); do [ -e " +
        dir.file("run/last.safetensors") +
        " ] && break; sleep 0.05; done; kill -9 $job; wait $job");
    INFO(killed.output);
    CHECK(killed.exit_code == 128 + SIGKILL);
    const Outcome resumed = run_gyre(0, train + " --resume auto --max-seconds 0.1");
    INFO(resumed.output);
    CHECK(count_of(resumed.output, "resumed from " + dir.file("run") + ": epoch 1, after step ") ==
          1);
    CHECK(count_of(resumed.output, "after step 0") == 0);
}

TEST_CASE("gyre launch starts ranks again as often as it may, and not after wrong input",
          "[words]") {
    const Job job;
    // A rank may use a second of the processor, then the system ends it by a signal.
    const Outcome limited =
        run_shell("ulimit -c 0; ulimit -S -t 1; exec " + gyre_binary() +
                  " launch -n 1 --max-restarts 1 -- " + job.base + "--epochs 900000 -q");
    INFO(limited.output);
    CHECK(limited.exit_code == 128 + SIGXCPU);
    CHECK(count_of(limited.output, "rank 0 was ended by signal") == 2);
    CHECK(count_of(limited.output, "(restart 1 of 1)") == 1);
    const Outcome wrong =
        run_gyre(0, "launch -n 2 --max-restarts 5 -- train --data " + job.file("none"));
    INFO(wrong.output);
    CHECK(wrong.exit_code == 3);
    CHECK(count_of(wrong.output, "start again") == 0);
}

TEST_CASE("gyre launch says what it lacks", "[words]") {
    const auto refuse = [](const std::string& words, const std::string& part) {
        const Outcome outcome = run_gyre(0, "launch " + words);
        INFO(words << "\n" << outcome.output);
        CHECK(outcome.exit_code == 2);
        CHECK(count_of(outcome.output, part) == 1);
    };
    refuse("-- train", "give the number of ranks with -n N, or --gpus");
    refuse("-n 2", "what are the ranks to do?");
    refuse("-n 0 -- train", "'0' must be a number from 1 to 1024");
    refuse("-n 2 --gpus -- train", "--gpus");
    refuse("-n 2 --max-restarts -1 -- train", "--max-restarts: '-1' must be a number >= 0");
    refuse("-n 2 --nnodes 2 -- train", "--nnodes 2 also needs --node-rank, which is 0 to 1");
    refuse("-n 2 --nnodes 2 --node-rank 1 -- train", "and --master-addr");
    refuse("-n 2 --node-rank 1 -- train", "--node-rank 1 of 1 hosts: they count from 0 to 0");
    refuse("-n 2 --nnodes 2 --node-rank 2 --master-addr ::1 -- train", "--node-rank 2 of 2 hosts");
    refuse("-n 2 --nnodes 2:4 -- train", "--nnodes 2:4 also needs --node-rank, which is 0 to 3");
    refuse("-n 2 --nnodes 4:2 -- train", "'4:2' must be a number of hosts from 1 to 1024, or the");
    refuse("-n 2 --nnodes 2: -- train", "'2:' must be a number of hosts");
    refuse("-n 2 --rejoin-timeout -1 -- train",
           "--rejoin-timeout: '-1' must be a finite number >= 0");
    refuse("-n 2 train", "'train'");
}
