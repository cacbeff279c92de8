// Two ranks with different flags: a difference either is refused, or can neither hang the job nor
// change what it learns.
#include <CLI/CLI.hpp>
#include <fstream>
#include <map>
#include <set>

#include "tests/program/gyre_process.hpp"
#include "tests/program/small_training.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/temp_dir.hpp"
#include "train/cli/flags.hpp"

using namespace gyre::test;

namespace {

struct Job {
    TempDir dir;
    std::string data = (dir.path() / "set").string(), base;
    Job() {
        make_dataset(data, 96, 20, 1, 28, 28, 3);
        base = "train --epochs 2 --batch-size 8 --log-interval 1 --timeout 20 ";
    }
    std::string file(const std::string& name) const { return (dir.path() / name).string(); }

    // Two ranks over MPI; `which` has the flags that the other lacks.
    Outcome run(const std::string& common, int which, const std::string& flags,
                const std::string& others = "") const {
        const auto shell = [&](const std::string& more) {
            return gyre_binary() + " " + common + " " + more;
        };
        return run_shell("timeout -k 1 60 " + std::string(GYRE_MPIRUN) +
                         " 2 bash -c 'if [ $OMPI_COMM_WORLD_RANK = " + std::to_string(which) +
                         " ]; then exec " + shell(flags) + "; else exec " + shell(others) +
                         "; fi'");
    }
};

// The lines with the loss of each step.
std::string losses(const std::string& output) {
    std::string lines;
    std::istringstream in(output);
    for (std::string line; std::getline(in, line);) {
        if (line.find("  step ") != line.npos) {
            lines += line + "\n";
        }
    }
    return lines;
}

// Flags that are given on one rank only, where that is not refused, with a value; FILE is a path.
const std::map<std::string, std::string> kOwnFlags = {
    {"--save", "--save FILE"},
    {"--resume", "--resume FILE"},
    {"--overwrite", "--overwrite"},
    {"--init", "--init FILE"},
    {"--finetune", "--finetune"},
    {"--metrics", "--metrics FILE.csv"},
    {"--tensorboard", "--tensorboard FILE"},
    {"--trace", "--trace FILE"},
    {"--config", "--config FILE"},
    {"--verbose", "-v"},
    {"--quiet", "-q"},
    {"--threads", "--threads 2"},
    {"--kernels-cache", "--kernels-cache FILE"},
    {"--flight-record", "--flight-record FILE"},
    {"--init-timeout", "--init-timeout 9"},
    {"--insecure", "--insecure"},
    {"--init-method", "--init-method mpi"},
};

}  // namespace

TEST_CASE("every flag is compared between the ranks, or tested here") {
    const Parsed parsed("");
    for (const CLI::Option* option : parsed.app.get_options()) {
        const std::string name = option->get_name();
        const bool elsewhere = name == "--help" || name == "--rank" || name == "--data" ||
                               name == "--no-cuda" || name == "--shards";  // other flags' names
        INFO(name);
        CHECK(int(parsed.manifest.count("flag " + name)) + int(kOwnFlags.count(name)) +
                  int(elsewhere) ==
              1);
    }
}

TEST_CASE("a flag that one rank alone has neither hangs the job nor changes what it learns") {
    const Job job;
    const std::string common = job.base + "--data " + job.data;
    const std::string weights = job.file("init") + "/last.safetensors";
    const Outcome plain =
        run_gyre(2, common + " --keep 99 --save-every 5steps --save " + job.file("plain"));
    const std::string tenth = job.file("plain") + "/step-000000010.safetensors";
    const Outcome from = run_gyre(2, common + " --seed 9 --save " + job.file("init"));
    REQUIRE(plain.exit_code == 0);
    REQUIRE(from.exit_code == 0);
    const std::string expected = losses(plain.output);
    REQUIRE(count_of(expected, "\n") == 12);
    for (const int rank : {0, 1}) {
        for (const auto& [name, flags] : kOwnFlags) {
            const std::string path = job.file("file" + name + std::to_string(rank));
            if (name == "--init") {
                std::filesystem::copy_file(weights, path);
            }
            if (name == "--resume") {
                std::filesystem::copy_file(tenth, path);
            }
            if (name == "--config") {  // with flags that the other rank has, too
                std::ofstream(path) << "epochs = 2\nthreads = 1\n";
            }
            std::string given = flags;
            if (const auto at = given.find("FILE"); at != given.npos) {
                given.replace(at, 4, path);
            }
            const Outcome outcome = job.run(common, rank, given);
            INFO(name << " on rank " << rank << "\n" << outcome.output);
            REQUIRE(outcome.exit_code == 0);
            if (name == "--init" && rank == 0) {  // rank 0's counts
                CHECK(losses(outcome.output) != expected);
                CHECK(count_of(losses(outcome.output), "\n") == 12);
                continue;
            }
            if (name == "--resume" && rank == 0) {  // likewise: the last two steps
                CHECK(count_of(losses(outcome.output), "\n") == 2);
                CHECK(expected.ends_with(losses(outcome.output)));
                continue;
            }
            if (name == "--quiet" && rank == 0) {
                CHECK(outcome.output.empty());
                continue;
            }
            CHECK(losses(outcome.output) == expected);
            const bool events = name == "--tensorboard" || name == "--metrics";
            const bool writes = name == "--save" || name == "--trace" || events;
            const bool roots = writes || name == "--init" || name == "--finetune" ||
                               name == "--resume" || name == "--overwrite";
            CHECK(count_of(outcome.output, name + " counts on rank 0 only") ==
                  (roots && rank == 1 ? 1 : 0));
            if (writes) {
                CHECK(std::filesystem::exists(path + (name == "--metrics" ? ".csv" : "")) ==
                      (rank == 0));
            }
        }
    }
    // Other weights to start from: rank 0's.
    const Outcome both = job.run(common, 1, "--init " + job.file("none"), "--init " + weights);
    CHECK(both.exit_code == 0);
    CHECK(losses(both.output) == losses(run_gyre(2, common + " --init " + weights).output));
}

TEST_CASE("data sets are compared by content, wherever flags and environment say they are") {
    const Job job, other;
    const Outcome same = job.run(job.base, 1, "--data " + other.data, "--data " + job.data);
    INFO(same.output);
    CHECK(same.exit_code == 0);
    // GYRE_DATA leads the second rank to a set of the same name.
    make_dataset(other.data, 96, 20, 1, 28, 28, 4);
    const auto by_environment = [&](const std::string& folder) {
        return run_shell("timeout -k 1 60 " + std::string(GYRE_MPIRUN) +
                         " 2 bash -c 'if [ $OMPI_COMM_WORLD_RANK = 1 ]; then export GYRE_DATA=" +
                         folder + "; else export GYRE_DATA=" + job.dir.path().string() +
                         "; fi; exec " + gyre_binary() + " " + job.base + " --data set'");
    };
    const Outcome differs = by_environment(other.dir.path().string());
    INFO(differs.output);
    CHECK(differs.exit_code == 4);
    CHECK(count_of(differs.output, "the data set differs") == 1);
    const Outcome missing = by_environment("/nowhere");
    INFO(missing.output);
    CHECK(missing.exit_code == 3);
    CHECK(count_of(missing.output, "on rank 1") == 1);
}

TEST_CASE("ranks that were asked for different things are refused at once") {
    const Job job;
    const std::string common = "train --epochs 2 --data " + job.data;
    const auto refuse = [&](int rank, const std::string& flags, const std::string& others,
                            const std::string& what) {
        const Outcome outcome = job.run("", rank, flags, others);
        INFO(flags << " on rank " << rank << "\n" << outcome.output);
        CHECK(outcome.exit_code != 0);
        CHECK(outcome.exit_code != 124);  // of timeout
        CHECK(count_of(outcome.output, what) >= 1);
    };
    for (const int rank : {0, 1}) {
        refuse(rank, "info", common, "the subcommand differs");
        refuse(rank, common + " --help", common, "--help or --version differs");
    }
    // Those that are used before anything can be compared.
    refuse(1, common + " --timeout 30", common + " --timeout 31", "flag --timeout differs");
    refuse(0, common + " --comm nccl", common, "flag --comm differs");
    refuse(1, common + " --comm gloo", common, "MASTER_ADDR is not set");
    refuse(1, common + " --rank 1", common, "MASTER_ADDR is not set");
    refuse(1, common + " --epochs none", common, "--epochs");
}

TEST_CASE("ranks that evaluate other weights under one path are refused") {
    const Job job;
    const std::string common = "--data " + job.data;
    for (const char* seed : {"1", "2"}) {
        std::filesystem::create_directory(job.file(seed));
        REQUIRE(run_gyre(0, "train --epochs 1 --no-eval " + common + " --seed " + seed +
                                " --save " + job.file(seed))
                    .exit_code == 0);
    }
    const Outcome outcome =
        run_shell("timeout -k 1 60 " + std::string(GYRE_MPIRUN) + " 2 bash -c 'cd " +
                  job.dir.path().string() + "/$((OMPI_COMM_WORLD_RANK + 1)); exec " +
                  gyre_binary() + " eval " + common + " --weights last.safetensors'");
    INFO(outcome.output);
    CHECK(outcome.exit_code == 4);
    CHECK(count_of(outcome.output, "the weights file differs") == 1);
}
