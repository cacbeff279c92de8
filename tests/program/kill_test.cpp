// Trainings that are killed, told to stop or run out of disk, and resume.
#include <filesystem>
#include <fstream>
#include <random>
#include <string>

#include "tests/program/gyre_process.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/temp_dir.hpp"
#include "train/checkpoint.hpp"

using namespace gyre::test;
namespace fs = std::filesystem;

namespace {

struct Job {
    TempDir dir;
    std::string base;
    Job() {
        make_dataset(dir.path() / "set", 120, 20, 1, 12, 12, 3);
        std::ofstream(file("model"))
            << "conv 8 k3\nbatchnorm local\nrelu\nmaxpool 2\ndropout 0.3\nlinear 64\nrelu\n"
               "linear classes\n";
        base =
            "train --threads 1 --shards 4 --global-batch 8 --optimizer adam --timeout 20 "
            "--log-interval 1 --data " +
            file("set") + " --model " + file("model") + " ";
    }
    std::string file(const std::string& name) const { return dir.file(name); }
    std::string bytes(const std::string& name) const { return file_bytes(file(name)); }
    // A shell's words that run two ranks, each of which leaves its process's number, and wait in
    // the background until rank 0 has written so many lines of JSON.
    std::string started(int ranks, const std::string& flags, int lines) const {
        const std::string json = file("log"), gyre = gyre_binary() + " " + base + flags;
        fs::remove(json);
        return "cd " + dir.path().string() + "; rm -f pid.*; " + GYRE_MPIRUN + " " +
               std::to_string(ranks) + " bash -c 'echo $$ > pid.$OMPI_COMM_WORLD_RANK; exec " +
               gyre + " --metrics " + json + "' & job=$!; for i in $(seq 1200); do [ \"$(cat " +
               json + " 2>/dev/null | wc -l)\" -ge " + std::to_string(lines) +
               " ] && break; sleep 0.02; done; ";
    }
};

constexpr int kSteps = 45;  // of the whole training

// Under a sanitizer, which makes all of it slow, a few.
#if defined(GYRE_SANITIZED)
constexpr int kKills = 3;
#else
constexpr int kKills = 20;
#endif

}  // namespace

TEST_CASE("a training that was killed at any moment goes on to the same bytes, on other ranks") {
    const Job job;
    REQUIRE(run_gyre(2, job.base + "--epochs 3 --save " + job.file("whole")).exit_code == 0);
    const std::string last = job.bytes("whole/last.safetensors");
    const std::string best = job.bytes("whole/best.safetensors");
    REQUIRE(!last.empty());
    std::mt19937 random(20261123);
    int begun = 0, drafts = 0;
    for (int i = 0; i < kKills; ++i) {
        fs::remove_all(job.file("run"));
        const int lines = std::uniform_int_distribution(1, kSteps - 5)(random);
        const int wait_ms = std::uniform_int_distribution(0, 30)(random);
        const std::string flags = "--epochs 3 --save run --save-every " +
                                  std::to_string(std::uniform_int_distribution(1, 4)(random)) +
                                  "steps ";
        // Writing takes longer than a step.
        const Outcome killed =
            run_shell("export GYRE_TEST_WRITE_PAUSE_MS=2; " + job.started(2, flags, lines) +
                      "sleep 0.0" + (wait_ms < 10 ? "0" : "") + std::to_string(wait_ms) +
                      "; kill -KILL $(cat pid.*); wait $job");
        INFO("killed after " << lines << " lines\n" << killed.output);
        CHECK(killed.exit_code != 0);
        begun += fs::exists(job.file("run/last.safetensors")) ? 1 : 0;
        drafts += fs::exists(job.file("run/last.safetensors.gyre.tmp")) ? 1 : 0;
        const bool again = fs::exists(job.file("run/last.safetensors"));
        const int ranks = 1 << std::uniform_int_distribution(0, 2)(random);
        const Outcome resumed = run_gyre(
            ranks, job.base + "--epochs 3 --save " + job.file("run") +
                       (again ? " --resume " + job.file("run") : std::string(" --overwrite")));
        INFO(resumed.output);
        REQUIRE(resumed.exit_code == 0);
        CHECK(job.bytes("run/last.safetensors") == last);
        CHECK(job.bytes("run/best.safetensors") == best);
    }
    CHECK(begun >= kKills / 4);
    CHECK((drafts >= 1 || kKills < 20));  // some were killed as they wrote
}

TEST_CASE(
    "a job that is killed on 4, 3 and 1 ranks resumes on 8, to the bytes of one that was not") {
    const Job job;
    std::ofstream(job.file("normed"))
        << "conv 8 k3\nbatchnorm\nrelu\nmaxpool 2\nas a\nconv 8 k3 p1\nbatchnorm\nadd a\nrelu\n"
           "dropout 0.3\nlinear classes\n";
    const std::string flags = "--shards 8 --epochs 6 --model " + job.file("normed") + " --save ";
    REQUIRE(run_gyre(2, job.base + flags + job.file("whole")).exit_code == 0);
    std::string resume;
    for (const int ranks : {4, 3, 1}) {
        const Outcome killed =
            run_shell("export GYRE_TEST_WRITE_PAUSE_MS=100; " +
                      job.started(ranks, flags + "run --save-every 2steps" + resume, 9) +
                      "kill -KILL $(cat pid.*); wait $job");
        INFO(ranks << " ranks\n" << killed.output);
        CHECK(killed.exit_code != 0);
        REQUIRE(fs::exists(job.file("run/last.safetensors")));
        resume = " --resume run";
    }
    const auto at = gyre::train::read_checkpoint(job.file("run")).cursor;
    CHECK((at.epoch - 1) * kSteps / 3 + at.step < 2 * kSteps);
    const Outcome resumed =
        run_gyre(8, job.base + flags + job.file("run") + " --resume " + job.file("run"));
    INFO(resumed.output);
    REQUIRE(resumed.exit_code == 0);
    CHECK(!job.bytes("whole/last.safetensors").empty());
    for (const char* name : {"/last.safetensors", "/best.safetensors"}) {
        CHECK(job.bytes(std::string("run") + name) == job.bytes(std::string("whole") + name));
    }
}

TEST_CASE("SIGTERM saves and ends; SIGUSR1 saves, and the training goes on; on any rank") {
    const Job job;
    for (const std::string rank : {"0", "1"}) {
        INFO("rank " << rank);
        fs::remove_all(job.file("run"));
        const Outcome stopped = run_shell(job.started(2, "--epochs 90000 --save run", 20) +
                                          "kill -TERM $(cat pid." + rank + "); wait $job");
        INFO(stopped.output);
        CHECK(stopped.exit_code == 130);
        CHECK(count_of(stopped.output, "--resume run resumes from here") == 1);
        const auto at = gyre::train::read_checkpoint(job.file("run")).cursor;
        CHECK((at.epoch - 1) * kSteps / 3 + at.step >= 15);
        const std::string epochs = "--epochs " + std::to_string(at.epoch) + " --save ";
        CHECK(run_gyre(2, job.base + epochs + job.file("run") + " --resume " + job.file("run"))
                  .exit_code == 0);
        CHECK(run_gyre(2, job.base + epochs + job.file("whole") + " --overwrite").exit_code == 0);
        CHECK(!job.bytes("whole/last.safetensors").empty());
        CHECK(job.bytes("run/last.safetensors") == job.bytes("whole/last.safetensors"));

        // Without an end of an epoch in reach.
        fs::remove_all(job.file("run"));
        const Outcome warned = run_shell(
            job.started(2, "--epochs 90000 --save run --save-every 90000 --keep 99", 5) +
            "kill -USR1 $(cat pid." + rank +
            "); for i in $(seq 600); do [ -f run/last.safetensors ] && break; sleep 0.05; done; "
            "ls run; n=$(wc -l < log); sleep 0.5; [ $(wc -l < log) -gt $n ] && echo goes on; "
            "kill -KILL $(cat pid.*); wait $job");
        INFO(warned.output);
        CHECK(count_of(warned.output, "last.safetensors") >= 1);
        CHECK(count_of(warned.output, "goes on") == 1);
        int numbered = 0;
        for (const fs::directory_entry& file : fs::directory_iterator(job.file("run"))) {
            numbered += file.path().filename().string().starts_with("step-") ? 1 : 0;
        }
        CHECK(numbered == 1);  // one signal, one checkpoint
        CHECK(gyre::train::read_checkpoint(job.file("run")).cursor.images >= 0);
    }
}

TEST_CASE("an interrupted evaluation counts for nothing, and is done again at the resume") {
    TempDir dir;
    make_dataset(dir.path() / "set", 16, 6000, 1, 12, 12, 3);
    std::ofstream(dir.file("model"))
        << "conv 64 k5 p2\nrelu\nconv 64 k5 p2\nrelu\nlinear classes\n";
    const std::string base =
        gyre_command(0,
                     "train --threads 1 --global-batch 8 --test-batch-size 20 --epochs 1 "
                     "--log-interval 1 --data " +
                         dir.file("set") + " --model " + dir.file("model") + " --save ");
    const std::string run = dir.file("run"), json = dir.file("log");
    // The second step is the epoch's last; an evaluation takes seconds.
    const Outcome stopped =
        run_shell(base + run + " --metrics " + json +
                  " & pid=$!; for i in $(seq 1200); do grep -qs '\"step\":2,' " + json +
                  " && break; sleep 0.02; done; sleep 0.1; kill -INT $pid; wait $pid");
    INFO(stopped.output);
    CHECK(stopped.exit_code == 130);
    CHECK(!fs::exists(run + "/best.safetensors"));
    const auto cursor = gyre::train::read_checkpoint(run).cursor;
    CHECK(cursor.epoch == 1);
    CHECK(cursor.step == 2);
    CHECK(cursor.best_accuracy < 0.0);
    REQUIRE(run_shell(base + run + " --resume " + run).exit_code == 0);
    REQUIRE(run_shell(base + dir.file("whole")).exit_code == 0);
    for (const char* name : {"/last.safetensors", "/best.safetensors"}) {
        CHECK(!file_bytes(run + name).empty());
        CHECK(file_bytes(run + name) == file_bytes(dir.file("whole") + name));
    }
}

TEST_CASE("a full disk ends a training with one error, and the old checkpoint survives") {
    const Job job;
    fs::create_directory(job.file("disk"));
    const std::string gyre = gyre_binary() + " " + job.base;
    const Outcome outcome = run_shell(
        "cd " + job.dir.path().string() +
        "; unshare -m bash -c 'mount -t tmpfs -o size=1m none disk && echo mounted && " + gyre +
        " --epochs 1 --save disk -q && cp disk/last.safetensors before && "
        "head -c 1m /dev/zero > disk/filler 2> /dev/null; ls disk; " +
        gyre +
        " --epochs 2 --save disk --resume disk; echo code $?; "
        "cp disk/last.safetensors after; ls disk'");
    INFO(outcome.output);
    if (count_of(outcome.output, "mounted") == 0) {
        WARN("skipped: no file system can be mounted here");
        return;
    }
    CHECK(count_of(outcome.output, "code 3") == 1);
    CHECK(count_of(outcome.output, "No space left on device") == 1);
    CHECK(count_of(outcome.output, "gyre.tmp") == 0);
    CHECK(!job.bytes("before").empty());
    CHECK(job.bytes("after") == job.bytes("before"));
}
