// gyre train --comm nccl from end to end, on the emulated GPU and a fake NCCL (fake_nccl.cpp): the
// losses, and what a user sees when something goes wrong. Each case has a time bound.
#include <fstream>

#include "tests/support/catch.hpp"
#include "tests/support/losses.hpp"
#include "tests/support/temp_dir.hpp"

using namespace gyre::test;

namespace {

// `gyre train` on the emulated GPU; environment: NAME=VALUE ... in front of it.
Outcome train(const TempDir& dir, const std::string& flags, const std::string& environment = {},
              int ranks = 2) {
    if (!std::filesystem::exists(dir.path() / "set")) {
        make_dataset(dir.path() / "set", 80, 10, 1, 28, 28, 10);
    }
    return run_shell("GYRE_NCCL_LIBRARY=" + built_file(FAKE_NCCL) + " " + environment +
                     " timeout -k 1 120 " +
                     gyre_command(ranks,
                                  "train --threads 1 --no-eval --seed 7 --log-interval 1 "
                                  "--global-batch 8 --data " +
                                      (dir.path() / "set").string() + " " + flags));
}

std::vector<double> losses(const TempDir& dir, const std::string& flags, int ranks = 2) {
    const auto json = dir.path() / "losses.jsonl";
    std::filesystem::remove(json);
    const Outcome run =
        train(dir, "--device emulated --epochs 1 --metrics " + json.string() + kSmoothNet + flags,
              {}, ranks);
    INFO(run.output);
    REQUIRE(run.exit_code == 0);
    CHECK(run.output.find("NCCL is not used") == std::string::npos);
    return step_losses(json);
}

}  // namespace

TEST_CASE("10 steps over NCCL give the losses of 10 steps over MPI") {
    const TempDir dir;
    // Two ranks, as a sum of two terms has one order.
    for (const std::string step : {"--accumulate 1 ", "--accumulate 2 "}) {
        const std::vector<double> mpi = losses(dir, step + "--comm mpi");
        REQUIRE(mpi.size() == 10);
        const bool checked = step == "--accumulate 1 ";
        const std::string flags =
            step + "--comm nccl " + (checked ? "--check-sync 7" : "--bucket-kib 1 --share-gpu");
        INFO(flags);
        CHECK(losses(dir, flags) == mpi);
        CHECK(losses(dir, flags + " --graph on") == mpi);
        if (!checked) {
            CHECK(losses(dir, flags + " --graph on --graph-steps 3") == mpi);
        }
    }
}

TEST_CASE("shards over NCCL, in a graph or not, give the bits of MPI") {
    const TempDir dir;
    std::ofstream(dir.path() / "normed")
        << "conv 4 k5 s2\nbatchnorm\nrelu\nconv 4 k3\nbatchnorm\nrelu\n"
           "linear classes\n";
    const std::string normed = "--model " + (dir.path() / "normed").string();
    for (const std::string& shards :
         {std::string("--shards 4 "), std::string("--shards 5 "), "--shards 5 " + normed + " "}) {
        INFO(shards);
        const std::string flags = shards + "--optimizer adam --bucket-kib 16 ";
        const std::vector<double> mpi = losses(dir, flags + "--comm mpi");
        REQUIRE(mpi.size() == 10);
        CHECK(losses(dir, flags + "--comm nccl --check-sync 7") == mpi);
        CHECK(losses(dir, flags + "--comm nccl --graph on") == mpi);
    }
}

TEST_CASE("virtual ranks have one result on one GPU and on several over NCCL") {
    const TempDir dir;
    std::ofstream(dir.path() / "normed")
        << "conv 4 k5 s2\nbatchnorm\nrelu\nas a\nconv 4 k3 p1\nbatchnorm\nadd a\nrelu\n"
           "maxpool 2\nlinear classes\n";
    const std::string normed = " --model " + (dir.path() / "normed").string();
    for (const std::string& net : {std::string(), normed}) {
        for (const std::string rule :
             {"--optimizer sgd --momentum 0.9 --max-grad-norm 0.5",
              "--optimizer adam --max-grad-norm 0.5 --shard-optimizer on"}) {
            const std::string flags = "--virtual-ranks 4 --bucket-kib 4 " + rule + net;
            INFO(flags);
            const std::vector<double> one = losses(dir, flags, 1);
            REQUIRE(one.size() == 10);
#if defined(GYRE_SANITIZED)
            const std::vector<int> several = {3};
#else
            const std::vector<int> several = {3, 4};
#endif
            for (const int ranks : several) {
                INFO(ranks << " ranks");
                CHECK(losses(dir, flags + " --comm nccl", ranks) == one);
            }
        }
    }
}

TEST_CASE("updates shared out over NCCL, in a graph or not, give every rank's own bits") {
    const TempDir dir;
    const std::string flags = "--comm nccl --optimizer adam --check-sync 7 --bucket-kib 16";
    const std::vector<double> own = losses(dir, flags);
    REQUIRE(own.size() == 10);
    CHECK(losses(dir, flags + " --shard-optimizer on") == own);
    CHECK(losses(dir, flags + " --shard-optimizer on --graph on") == own);
    // The emulator's gradients travel through the host's memory over MPI, which has none of a
    // GPU's.
    const std::string ways =
        "--optimizer adam --factors on --comm-dtype bf16 --shard-optimizer on ";
    CHECK(losses(dir, ways + "--comm mpi") == losses(dir, ways + "--comm nccl"));
    const std::string clipped = flags + " --max-grad-norm 0.1 --shard-optimizer on";
    const std::vector<double> called = losses(dir, clipped);
    CHECK(called != own);
    CHECK(losses(dir, clipped + " --graph on") == called);
}

TEST_CASE("an asynchronous error ends the job at once, with a report, though the abort hangs") {
    const TempDir dir;
    const std::string record = (dir.path() / "flight").string();
    const Outcome run =
        train(dir, "--device emulated --comm nccl --epochs 1000 --flight-record " + record,
              "GYRE_FAKE_NCCL=async:12,abort");
    INFO(run.output);
    CHECK(run.exit_code == 4);
    CHECK(count_of(run.output, "NCCL reports") == 1);
    for (const char* part : {"remote process exited", "fake: connection closed", "allreduce(fp32)",
                             "step ", "bucket ", "rank "}) {
        INFO(part);
        CHECK(count_of(run.output, part) >= 1);
    }
    CHECK(std::filesystem::exists(record + ".rank0.json"));
    CHECK(std::filesystem::exists(record + ".rank1.json"));
}

TEST_CASE("a reduction that does not end is found also where the host waits for the device only") {
    const TempDir dir;
    // --check-sync reads the parameters, for which the device must have finished its reductions.
    const Outcome run = train(dir,
                              "--device emulated --comm nccl --check-sync 1 --epochs 1000 "
                              "--timeout 2",
                              "GYRE_FAKE_NCCL=stall:12");
    INFO(run.output);
    CHECK(run.exit_code == 4);
    CHECK(count_of(run.output, "no progress for 2 s") == 1);
    CHECK(count_of(run.output, "allreduce(fp32)") >= 1);
}

TEST_CASE("a reduction in a graph that does not end is found") {
    const TempDir dir;
    for (const std::string steps : {"1", "3"}) {
        const Outcome run = train(dir,
                                  "--device emulated --comm nccl --graph on --timeout 2 "
                                  "--epochs 1000 --graph-steps " +
                                      steps,
                                  "GYRE_FAKE_NCCL=stall:12");
        INFO(run.output);
        CHECK(run.exit_code == 4);
        CHECK(count_of(run.output, "no progress for 2 s") == 1);
        CHECK(count_of(run.output, "graph with ") >= 1);
        CHECK(count_of(run.output, "could not be captured") == 0);
    }
}

TEST_CASE("a call of NCCL that fails names itself, its place, rank and host") {
    const TempDir dir;
    const Outcome run =
        train(dir, "--device emulated --comm nccl --epochs 1000", "GYRE_FAKE_NCCL=call:10");
    INFO(run.output);
    CHECK(run.exit_code == 4);
    for (const char* part : {"NCCL: all_reduce(data, data, ", "an error of the fake NCCL",
                             "nccl_communicator.cpp:", "rank ", " on ", "NCCL_DEBUG=INFO"}) {
        INFO(part);
        CHECK(count_of(run.output, part) >= 1);
    }
}

TEST_CASE("a call of NCCL that fails in a capture ends the job") {
    const TempDir dir;
    // Two steps warm up; with a bucket each, the third call is the first of a capture.
    const Outcome run =
        train(dir, "--device emulated --comm nccl --graph on --bucket-kib 65536 --epochs 1000",
              "GYRE_FAKE_NCCL=call:2");
    INFO(run.output);
    CHECK(run.exit_code == 4);
    CHECK(count_of(run.output, "could not be captured") == 0);
    CHECK(count_of(run.output, "NCCL: all_reduce(data, data, ") == 1);
}

TEST_CASE("the real NCCL, or none, says that it does not know the emulated GPU") {
    const TempDir dir;
    const Outcome run =
        train(dir, "--device emulated --comm nccl", "GYRE_NCCL_LIBRARY=libnccl.so.2");
    INFO(run.output);
    CHECK(run.exit_code == 2);
    CHECK(count_of(run.output, "use --comm") == 1);
}
