// The command line: what is mistyped, forgotten or called otherwise elsewhere, and --help.
#include <sstream>

#include "tests/program/gyre_process.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/temp_dir.hpp"
#include "train/cli/setup.hpp"
#include "train/cli/terminal.hpp"
#include "train/cli/tutorial_flags.hpp"
#include "train/nearest.hpp"

using namespace gyre::test;
using namespace gyre::train;

namespace {

void refuse(const std::string& arguments, std::initializer_list<std::string> parts) {
    const Outcome outcome = run_gyre(0, arguments);
    INFO(arguments << "\n" << outcome.output);
    CHECK(outcome.exit_code == 2);
    std::size_t at = 0;  // in this order
    for (const std::string& part : parts) {
        INFO("expected to contain: " << part);
        at = outcome.output.find(part, at);
        REQUIRE(at != std::string::npos);
    }
}

int longest_line(const std::string& text) {
    int longest = 0;
    std::istringstream in(text);
    for (std::string line; std::getline(in, line);) {
        longest = std::max(longest, columns_of(line));
    }
    return longest;
}

}  // namespace

TEST_CASE("unknown flags are named in the order typed, with what was meant") {
    refuse("train --epcohs 3 --no-such-flag --bacth-size 3",
           {"gyre train has no flag --epcohs; did you mean --epochs?", "--no-such-flag",
            "--bacth-size; did you mean --batch-size?", "see `gyre train --help`"});
    refuse("eval --weihgts x", {"--weihgts; did you mean --weights?", "see `gyre eval --help`"});
    refuse("train --epochs 0", {"--epochs", ">= 1", "see `gyre train --help`"});
    refuse("train --augment hflip,shfit2", {"--augment", "'shfit2'", "did you mean shift?"});
    refuse("train --augment shift", {"--augment", "'shift'", "a number of pixels", "shift4"});
    refuse("train --augment randomresizedcrop224",
           {"--augment", "percent", "8 in torchvision", "--resize"});
    refuse("train --augment mixup2", {"--augment", "from 0.001 to 1", "mixup0.2"});
    refuse("train --augment cutmix0.0001", {"--augment", "three decimals", "cutmix0.2"});
    refuse("train --augment rotate181", {"--augment", "degrees from 1 to 180"});
    refuse("train --augment crop0", {"--augment", "'crop0'", "from 1"});
    refuse("train --augment hflip2", {"--augment", "no number"});
    refuse("train --augment hflip,hflip", {"--augment", "twice"});
    refuse("train --augment altflip,hflip", {"--augment", "'hflip'", "exclude each other"});
    refuse("train --whiten conv1 --init x", {"--init excludes --whiten"});
    refuse("train --resize 28", {"--resize", "'28'", "such as 64x64"});
    refuse("train --resize 0x28", {"--resize", "'0x28'"});
    refuse("train --resize 256,centercrop257", {"--resize", "at most 256"});
    refuse("train --optimizer adm", {"'adm'", "sgd, adam, adamw", "did you mean adam?"});
    refuse("train 50 10", {"'50 10'", "--epochs 10", "see `gyre train --help`"});
    CHECK(nearest("--epochs", {"--epoch"}) == "--epoch");
    CHECK(nearest("--xyz", {"--epochs", "--lr"}).empty());
}

TEST_CASE("a forgotten or mistyped subcommand is said") {
    refuse("--epochs 3", {"the subcommand", "comes first: gyre train --epochs 3"});
    refuse("--epochs 3 train", {"comes first: gyre train --epochs 3"});
    refuse("trian --epochs 3", {"'trian' is not a subcommand", "did you mean train?"});
    refuse("mnist", {"'mnist' is not a subcommand (train, verify, replay, eval, plan, info, "
                     "predict, export, import, "
                     "diff, plot, launch)"});
    refuse("", {"subcommand", "see `gyre --help`"});
}

TEST_CASE("options of the library's messages get their flags' names, commands stay") {
    using gyre::train::with_flag_names;
    CHECK(with_flag_names("raise `timeout` or `init-timeout`; `rule` sgd") ==
          "raise --timeout or --init-timeout; --optimizer sgd");
    for (const char* same : {"", "no option", "one ` alone", "use `srun --mpi=pmix` or ``",
                             "`.idx` for `-idx`", "`Not one` and `neither, this` nor `"}) {
        CHECK(with_flag_names(same) == same);
    }
}

TEST_CASE("the tutorials' flags are understood, or answered with the flag that does it") {
    const TempDir dir;
    const std::string data = (dir.path() / "set").string();
    make_dataset(data, 40, 8, 1, 28, 28, 2);
    const Outcome trained = run_gyre(
        0, "train --backend MPI --data_dir " + data +
               " -b 8 --num_epochs 1 --learning-rate 0.1 --optim Adam --no-accel --print-freq 2 "
               "--wd 0 --comm-dtype BF16 --factors OFF");
    INFO(trained.output);
    CHECK(trained.exit_code == 0);
    CHECK(count_of(trained.output, "1 rank of batch 8") == 1);
    CHECK(count_of(trained.output, "epoch 1/1  step 2/5") == 1);
    refuse("train --tcp tcp://localhost:4000", {"--tcp: --init-method tcp://HOST:PORT"});
    refuse("train --gpu 0", {"--gpu: ", "CUDA_VISIBLE_DEVICES"});
    refuse("train -n 1 -g 2 -nr 0", {"-n: ", "mpirun -np N", "-g: ", "-nr: "});
    refuse("train --local_rank 0", {"--local_rank: ", "torchrun", "--world-size"});
    refuse("train --save-model", {"--save DIR"});
    // Every answer that is a flag of ours is one, and no flag of ours stands in the table.
    const std::string help = run_gyre(0, "train --help").output;
    for (const TutorialFlag& flag : tutorial_flags()) {
        INFO(flag.name);
        CHECK(flag.same.empty() != flag.instead.empty());
        CHECK(count_of(help, "  " + std::string(flag.name) + " ") == 0);
        if (!flag.same.empty()) {
            CHECK(count_of(help, "  " + std::string(flag.same)) >= 1);
        }
        std::istringstream words{std::string(flag.instead)};
        for (std::string word; flag.instead.starts_with("--") && words >> word;) {
            if (word.starts_with("--")) {
                CHECK(count_of(help, "  " + word) >= 1);
            }
        }
    }
}

TEST_CASE(
    "torch.distributed.launch's --local-rank, before the subcommand, repeats the environment") {
    const TempDir dir;
    const std::string data = (dir.path() / "set").string();
    make_dataset(data, 40, 8, 1, 28, 28, 2);
    const auto run = [&](const std::string& local_rank, const std::string& flag) {
        return run_shell("RANK=0 WORLD_SIZE=1 LOCAL_RANK=" + local_rank + " " +
                         gyre_command(0, flag + " train --epochs 1 --data " + data));
    };
    for (const char* flag : {"--local-rank=0", "--local_rank 0"}) {
        const Outcome outcome = run("0", flag);
        INFO(outcome.output);
        CHECK(outcome.exit_code == 0);
    }
    CHECK(run("1", "--local-rank=0").exit_code == 2);
}

TEST_CASE("--help is grouped, gives two examples, and fits 80 columns") {
    const std::string help = run_gyre(0, "train --help").output;
    INFO(help);
    std::size_t at = 0;
    for (const char* group : {"\nData:", "\nModel:", "\nTraining:", "\nRanks:", "\nGPU:",
                              "\nOutput:", "\nDiagnosis:", "\nExamples:\n  gyre train", "mpirun"}) {
        INFO(group);
        at = help.find(group, at);
        REQUIRE(at != std::string::npos);
    }
    CHECK(count_of(help, "--optimizer sgd|adam|adamw") == 1);
    for (const char* command : {"", "train ", "eval ", "plan "}) {
        const Outcome outcome = run_gyre(0, std::string(command) + "--help");
        INFO(outcome.output);
        CHECK(outcome.exit_code == 0);
        CHECK(longest_line(outcome.output) <= 80);
    }
}

TEST_CASE("lines fit the terminal, whatever its width") {
    CHECK(wrap({"aa", "bb", "cc"}, " · ", 0) == "aa · bb · cc");
    CHECK(wrap({"aa", "bb", "cc"}, " · ", 7) == "aa · bb\n  cc");
    Progress progress;
    progress.epoch = progress.epochs = 10;
    progress.done = progress.images = 60000;
    progress.images_per_second = 123456;
    for (int columns = 1; columns < 150; ++columns) {
        CHECK(columns_of(progress_line(progress, columns)) < columns);
    }
    CHECK(count_of(progress_line(progress, 100), "60000/60000") == 1);
    progress.evaluates = true;
    for (int columns = 1; columns < 150; ++columns) {
        CHECK(columns_of(progress_line(progress, columns)) < columns);
    }
    CHECK(progress_line(progress, 100).starts_with("epoch 10/10 evaluating [####"));

    const TempDir dir;
    const std::string data = (dir.path() / "set").string();
    make_dataset(data, 400, 8, 1, 28, 28, 2);
    for (const int columns : {30, 60, 80}) {
        const std::string train = "train --batch-size 2 --epochs 2 --data " + data;
        // By itself, under mpirun, and under gyre launch, which puts each rank before its lines.
        for (const std::string& command :
             {gyre_command(0, train), gyre_command(2, train),
              gyre_binary() + " launch -n 2 -- " + train + " --threads 1"}) {
            const bool launched = command.find(" launch ") != command.npos;
            if (command != gyre_command(0, train) && columns != 60) {
                continue;
            }
            const Outcome outcome = run_shell("script -qec 'stty cols " + std::to_string(columns) +
                                              "; " + command + "' /dev/null");
            INFO(columns << " columns\n" << outcome.output);
            REQUIRE(outcome.exit_code == 0);
            const std::string rank = launched ? "[0] " : "";
            CHECK(count_of(outcome.output, "\r\033[K" + rank + "epoch 1/2 [") >= 1);
            CHECK(count_of(outcome.output, "\r\033[K" + rank + "epoch 1/2 evaluating") >= 1);
            // A bar is drawn over before the next line.
            CHECK(count_of(outcome.output, "\r\033[K" + rank + "epoch 1/2  train loss") == 1);
            std::istringstream in(outcome.output);
            for (std::string line; std::getline(in, line, '\r');) {
                std::istringstream lines(line);
                for (std::string part; std::getline(lines, part);) {
                    const std::string clear = "\033[K";
                    part = part.substr(part.starts_with(clear) ? clear.size() : 0);
                    INFO(part);
                    const bool bar = part.find("/2 [") != part.npos;
                    CHECK((columns_of(part) <= columns || (!bar && columns < 60)));
                }
            }
        }
    }
}

TEST_CASE("--quiet prints nothing but errors, and still writes its files") {
    const TempDir dir;
    const std::string data = (dir.path() / "set").string(), json = (dir.path() / "log").string();
    make_dataset(data, 40, 8, 1, 28, 28, 2);
    const Outcome outcome =
        run_gyre(2, "train -q --tune-buckets --epochs 1 --data " + data + " --metrics " + json);
    CHECK(outcome.exit_code == 0);
    CHECK(outcome.output.empty());
    CHECK(read_events(json, "end").size() == 1);
    refuse("train --quiet -v", {"--quiet"});
    CHECK(run_gyre(0, "train -q --data no-such-set").output.starts_with("gyre: "));
}
