// gyre train --virtual-ranks, or --shards: the same bits of losses, evaluation and saved weights on
// any number of ranks.
#include <cmath>
#include <fstream>
#include <numeric>
#include <vector>

#include "comm/launch/rendezvous.hpp"
#include "model/safetensors.hpp"
#include "tests/program/small_training.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/expect_error.hpp"
#include "tests/support/losses.hpp"
#include "tests/support/temp_dir.hpp"
#include "train/checkpoint.hpp"

using namespace gyre;
using namespace gyre::train;
using namespace gyre::test;

namespace {

// The parts that must be equal.
struct Bits {
    std::vector<double> losses, test_losses;
    std::string weights;
    bool operator==(const Bits&) const = default;
};

// A checkpoint without its metadata, which contain the flags.
std::string weights_of(const std::filesystem::path& run) {
    std::string bytes;
    for (const HostTensor& tensor : read_safetensors((run / "last.safetensors").string()).tensors) {
        bytes += tensor.name;
        bytes.append(reinterpret_cast<const char*>(tensor.values.data()),
                     tensor.values.size() * sizeof(float));
    }
    return bytes;
}

// As a threads' job. 53 images: the last batch of an epoch is uneven, and has empty shards.
Bits trained(const Training& training, int ranks, const std::string& flags) {
    const std::string weights = training.file("weights");
    const auto result =
        training.run(ranks, "--epochs 2 --seed 7 --overwrite --save " + weights + " " + flags);
    Bits bits{result.losses, {}, weights_of(weights)};
    for (const auto& epoch : result.epochs) {
        bits.test_losses.push_back(epoch.at("test_loss"));
    }
    return bits;
}

void write_model(const std::string& path) {
    std::ofstream(path) << "conv 6 k3\nbatchnorm local\nrelu\nmaxpool 2\ndropout 0.5\nlinear 20\n"
                           "relu\nlinear classes\n";
}

// Two linear layers before the last, of which the second has more weights than a cache holds.
void write_large(const std::string& path, int first, int second) {
    std::ofstream(path) << "linear " << first << "\nrelu\nlinear " << second
                        << "\nrelu\ndropout 0.5\nlinear classes\n";
}

// All shards meet in `batchnorm`, also where another path joins; they do not in `batchnorm local`.
void write_meeting(const std::string& path, const std::string& norm = "batchnorm",
                   const std::string& inner = "batchnorm local") {
    std::ofstream(path) << "conv 5 k3\n" + norm + "\nrelu\nas a\nconv 5 k3 p1\n" + inner +
                               "\nrelu\nconv 5 k3 p1\n" + norm +
                               "\nadd a\nrelu\ndropout 0.3\nlinear classes\n";
}

// The numbers of ranks from first to last; under a sanitizer, which makes each training slow, these
// two.
std::vector<int> rank_counts(int first, int last) {
#if defined(GYRE_SANITIZED)
    return {first, last};
#else
    std::vector<int> counts(static_cast<std::size_t>(last - first + 1));
    std::iota(counts.begin(), counts.end(), first);
    return counts;
#endif
}

// As processes; a command's environment and launcher are the same for all.
Bits processes(const TempDir& dir, int ranks, const std::string& flags) {
    const std::string name = (dir.path() / ("ranks-" + std::to_string(ranks))).string();
    const Outcome outcome = run_gyre(ranks, "train --data " + (dir.path() / "set").string() +
                                                " --metrics " + name + " --overwrite --save " +
                                                name + ".run --log-interval 1 --seed 7 --model " +
                                                (dir.path() / "model").string() + " " + flags);
    INFO(outcome.output);
    REQUIRE(outcome.exit_code == 0);
    Bits bits{step_losses(name), {}, file_bytes(name + ".run/last.safetensors")};
    for (const auto& epoch : read_events(name, "epoch")) {
        bits.test_losses.push_back(epoch.at("test_loss"));
    }
    return bits;
}

}  // namespace

TEST_CASE("shards give the same bits on any number of ranks up to theirs") {
    const Training training;
    write_model(training.model());
    const struct {
        int shards;
        const char* flags;
    } cases[] = {
        {8, "--global-batch 13 --optimizer adam"},
        {4, "--batch-size 3 --momentum 0.9 --nesterov --bucket-kib 1"},
        {4, "--global-batch 10 --max-grad-norm 0.5 --precision fp16 --test-batch-size 4"},
        {4, "--global-batch 9 --tune-buckets --weight-decay 0.1"},
        {4, "--global-batch 12 --optimizer adam --precision fp16 --shard-optimizer on"},
        {6, "--global-batch 14 --optimizer adam --bucket-kib 1 --ema 0.9"},
        {5, "--batch-size 2 --momentum 0.9 --shard-optimizer on"},
        {6, "--global-batch 14 --optimizer adam --bucket-kib 1 --comm-dtype bf16"},
        {4, "--global-batch 12 --comm-dtype fp16 --precision fp16 --shard-optimizer on"},
        {7, "--global-batch 14 --max-grad-norm 0.05 --shard-optimizer on --bucket-kib 1"},
    };
    for (const auto& [shards, flags] : cases) {
        const std::string all = std::string(flags) + " --shards " + std::to_string(shards);
        const Bits one = trained(training, 1, all);
        CHECK(one.test_losses.at(0) != one.test_losses.at(1));  // it does learn
        CHECK(one.weights.size() > 1000);
        for (const int ranks : rank_counts(2, shards)) {
            INFO(all << ", " << ranks << " ranks");
            CHECK(trained(training, ranks, all) == one);
        }
    }
}

TEST_CASE("statistics of the global batch have the same bits on any number of ranks") {
    const Training training;
    write_meeting(training.model());
    const struct {
        int shards;
        const char* flags;
    } cases[] = {
        {8, "--global-batch 21 --optimizer adam --max-grad-norm 1 --ema 0.9"},
        {5, "--global-batch 14 --momentum 0.9 --bucket-kib 1 --comm-dtype bf16"},
        {4,
         "--global-batch 18 --optimizer adam --shard-optimizer on --precision bf16 "
         "--max-grad-norm 0.5"},
        {2, "--global-batch 12 --accumulate 3 --label-smoothing 0.1 --augment shift1"},
    };
    for (const auto& [shards, flags] : cases) {
        const std::string all = std::string(flags) + " --shards " + std::to_string(shards);
        const Bits one = trained(training, 1, all);
        CHECK(one.test_losses.at(0) != one.test_losses.at(1));
        for (const int ranks : rank_counts(2, shards)) {
            INFO(all << ", " << ranks << " ranks");
            CHECK(trained(training, ranks, all) == one);
        }
    }
}

TEST_CASE("shards have statistics of the global batch, up to the rounding of sums") {
    const Training training;
    const std::string flags = "--epochs 1 --global-batch 24 --lr 0.01 ";
    const auto first_loss = [&](const char* more) {
        return training.run(1, flags + more).losses.at(0);
    };
    write_meeting(training.model(), "batchnorm", "batchnorm");
    const double whole = first_loss(""), shards = first_loss("--shards 6");
    write_meeting(training.model(), "batchnorm", "batchnorm local");
    const double local = first_loss("--shards 6");
    // The rounding of a few thousand additions, and what another mean does to 4 images.
    CHECK(std::abs(shards - whole) < 1e-4 * whole);
    CHECK(std::abs(local - whole) > 1e-3 * whole);
}

TEST_CASE("a shard to a rank is what ranks without shards do, where a sum has one order") {
    const Training training;
    write_model(training.model());
    const std::string flags = "--global-batch 10 --optimizer adam";
    CHECK(trained(training, 1, flags + " --shards 1") == trained(training, 1, flags));
    CHECK(trained(training, 2, flags + " --shards 2") == trained(training, 2, flags));
    write_meeting(training.model());
    CHECK(trained(training, 1, flags + " --shards 1") == trained(training, 1, flags));
    CHECK(trained(training, 2, flags + " --shards 2") == trained(training, 2, flags));
}

TEST_CASE("a training by shards resumes on any number of ranks to the same bits") {
    const Training training;
    write_meeting(training.model());
    const std::string flags = "--global-batch 13 --optimizer adam --shards 8";
    const Bits whole = trained(training, 1, flags);
    const std::filesystem::path run = training.file("run");
    for (const auto& [begun, resumed] : {std::pair{3, 5}, std::pair{5, 8}, std::pair{8, 3}}) {
        INFO("begun on " << begun << " ranks, resumed on " << resumed);
        const std::string all = "--seed 7 --overwrite " + flags + " --save " + run.string();
        training.run(begun, all + " --epochs 1");
        training.run(resumed, all + " --epochs 2 --resume " + run.string());
        CHECK(weights_of(run) == whole.weights);
    }
}

TEST_CASE("gathered factors of virtual ranks give the bits of reduced gradients") {
    const Training training;
    write_large(training.model(), 400, 400);
    for (const std::string rule :
         {"--optimizer adam", "--momentum 0.9 --max-grad-norm 0.5",
          "--optimizer adam --max-grad-norm 0.5 --shard-optimizer on --bucket-kib 64"}) {
        const std::string flags =
            "--epochs 1 -v --overwrite --seed 7 --global-batch 14 --virtual-ranks 6 " + rule +
            " --save " + training.file("run");
        const auto result = [&](int ranks, const std::string& factors) {
            return training.run(ranks, flags + " --factors " + factors);
        };
        const auto one = result(1, "auto");
        const std::string weights = weights_of(training.file("run"));
        for (const int ranks : rank_counts(2, 6)) {
            INFO(rule << ", " << ranks << " ranks");
            const auto reduced = result(ranks, "off");
            CHECK(weights_of(training.file("run")) == weights);
            const auto gathered = result(ranks, "on");
            CHECK(weights_of(training.file("run")) == weights);
            CHECK(gathered.losses == one.losses);
            CHECK(gathered.output.find("of factors gathered") != std::string::npos);
            CHECK(reduced.output.find("of factors gathered") == std::string::npos);
        }
    }
}

TEST_CASE("shards that go through a large layer together give the bits that they give alone") {
    const Training training;
    write_large(training.model(), 40, 3300);
    for (const std::string flags :
         {"--global-batch 40 --optimizer adam", "--batch-size 3 --momentum 0.9 --max-grad-norm 0.5",
          "--global-batch 24 --comm-dtype bf16", "--global-batch 24 --precision bf16",
          "--global-batch 24 --optimizer adam --shard-optimizer on --bucket-kib 64"}) {
        const std::string all = flags + " --virtual-ranks 6";
        const Bits alone = trained(training, 6, all);  // a shard to a rank
        for (const int ranks : rank_counts(1, 5)) {
            INFO(all << ", " << ranks << " ranks");
            CHECK(trained(training, ranks, all) == alone);
        }
        INFO(all);
        CHECK(trained(training, 2, all + " --audit 1") == alone);
    }
    const std::string flags = "--global-batch 24 --optimizer adam ";
    CHECK(trained(training, 2, flags + "--virtual-ranks 3 --accumulate 2").weights ==
          trained(training, 2, flags + "--virtual-ranks 6").weights);
}

TEST_CASE("CPU ranks are virtual ranks unless settings say otherwise") {
    const Training training;
    const auto expect = [&](int ranks, const std::string& flags, const std::string& count) {
        INFO(ranks << " ranks, " << flags);
        const std::filesystem::path run = training.file("run");
        training.run(ranks, "--epochs 1 --overwrite --save " + run.string() + " " + flags);
        CHECK(read_checkpoint(run).identity.settings.at("virtual-ranks") == count);
    };
    expect(2, "", "2");
    expect(2, "--virtual-ranks auto", "2");
    expect(2, "--virtual-ranks 0", "0");
    expect(1, "", "0");
    expect(1, "--virtual-ranks 4", "4");
    expect(1, "--shards 4", "4");
    expect(3, "", "0");  // threads do not add up in the tree over three ranks
    expect(2, "--accumulate 2", "0");
    expect(2, "--factors on", "2");
    expect(2, "--shard-optimizer on --max-grad-norm 1", "2");
}

TEST_CASE("a training of several ranks resumes on fewer to the same bits by default") {
    const TempDir dir;
    make_dataset(dir.path() / "set", 53, 37, 1, 6, 6, 3);
    write_meeting((dir.path() / "model").string());
    const std::string run = (dir.path() / "run").string();
    const auto weights = [&](int ranks, const std::string& flags) {
        const Outcome outcome =
            run_gyre(ranks, "train --threads 1 --seed 7 --optimizer adam --batch-size 4 --data " +
                                (dir.path() / "set").string() + " --model " +
                                (dir.path() / "model").string() + " --overwrite --save " + run +
                                " " + flags);
        INFO(flags << '\n' << outcome.output);
        REQUIRE(outcome.exit_code == 0);
        return weights_of(run);
    };
    const std::string whole = weights(3, "--epochs 2");
    const Identity identity = read_checkpoint(run).identity;
    const auto library = identity.facts.find("communicator");  // of a training without them
    if (library != identity.facts.end() && library->second != "shared memory") {
        WARN("skipped: the ranks do not share memory here, but reduce over " << library->second);
        return;
    }
    CHECK(identity.settings.at("virtual-ranks") == "3");
    for (const int ranks : {1, 2}) {
        INFO("resumed on " << ranks << " ranks");
        CHECK(weights(3, "--epochs 1") != whole);
        CHECK(weights(ranks, "--epochs 2 --resume " + run) == whole);
    }
    CHECK(weights(1, "--epochs 2 --virtual-ranks 3") == whole);
}

TEST_CASE("the number of threads changes no bit") {
    const Training training;
    write_model(training.model());
    for (const std::string& flags :
         {std::string("--global-batch 40"), std::string("--global-batch 40 --shards 2")}) {
        const Bits one = trained(training, 1, flags + " --threads 1");
        for (const char* threads : {" --threads 2", " --threads 3"}) {
            INFO(flags << threads);
            CHECK(trained(training, 1, flags + threads) == one);
        }
    }
}

TEST_CASE("--accumulate divides each shard, so that the sums are those of as many more shards") {
    const Training training;
    write_model(training.model());
    const std::string flags = "--global-batch 24 --optimizer adam --max-grad-norm 0.5 ";
    const Bits more = trained(training, 1, flags + "--shards 12");
    for (const int ranks : {1, 2, 3, 4}) {
        INFO(ranks << " ranks");
        const Bits divided = trained(training, ranks, flags + "--shards 4 --accumulate 3");
        CHECK(divided.losses == more.losses);
        CHECK(divided.weights == more.weights);
    }
    const auto start = training.run(2, "--epochs 1 --batch-size 3 --shards 2 --accumulate 2").start;
    CHECK(start.at("global_batch") == 12);
}

TEST_CASE("an audit changes no bit, on a CPU and on a GPU with graphs") {
    const Training training;
    const std::string cpu = "--global-batch 24 --shards 4";
    for (const auto& [flags, meeting] : {std::pair{cpu, false},
                                         {cpu + " --device emulated --graph on", false},
                                         {cpu, true},
                                         {cpu + " --device emulated --graph on", true}}) {
        INFO(flags);
        if (meeting) {
            write_meeting(training.model());
        } else {
            write_model(training.model());
        }
        const Bits without = trained(training, 1, flags);
        CHECK(trained(training, 1, flags + " --audit 2 --audit-warn") == without);
        if (flags.find("emulated") == flags.npos) {  // which has one rank to a process
            CHECK(trained(training, 3, flags + " --audit 1") == without);
        }
    }
}

TEST_CASE("--batch-size is a shard's, so that the step does not depend on the ranks") {
    const Training training;
    for (const int ranks : {1, 2}) {
        const auto start = training.run(ranks, "--epochs 1 --batch-size 3 --shards 4").start;
        CHECK(start.at("global_batch") == 12);
    }
}

TEST_CASE("what cannot be summed up by shards is refused") {
    const Training training;
    const auto refuse = [&](int ranks, const std::string& flags,
                            std::initializer_list<std::string> parts) {
        INFO(flags);
        expect_error(ExitCode::usage, parts, [&] { training.run(ranks, "--epochs 1 " + flags); });
    };
    refuse(2, "--shards 1", {"`virtual-ranks` 1", "2 ranks", "have one"});
    refuse(4, "--shards 3", {"`virtual-ranks` 3", "4 ranks"});
    refuse(2, "--global-batch 40 --shards 4096 --accumulate 4096",
           {"`virtual-ranks` 4096 with `accumulate` 4096", "16777216 passes"});
    refuse(1, "--audit 2", {"`audit` needs `virtual-ranks`"});
    refuse(1, "--shards 4 --kernels auto --device emulated", {"`kernels` auto", "`virtual-ranks`"});
}

TEST_CASE("shards give the same bits on 1 to 4 processes, whatever they reduce over", "[losses]") {
    const TempDir dir;
    make_dataset(dir.path() / "set", 343, 100, 1, 28, 28, 10);
    write_model((dir.path() / "model").string());
    const std::string flags =
        "--shards 4 --global-batch 60 --epochs 2 --optimizer adam --bucket-kib 4 ";
    const Bits one = processes(dir, 1, flags + "--threads 2");
    REQUIRE(one.losses.size() == 12);
    REQUIRE(one.weights.size() > 1000);
    for (const int ranks : {2, 3, 4}) {
        for (const char* over : {"--comm auto", "--comm mpi", "--comm gloo"}) {
            if (!comm::gloo_available() && std::string(over) == "--comm gloo") {
                continue;
            }
            INFO(ranks << " ranks, " << over);
            const std::string meeting =
                std::string(over) == "--comm gloo"
                    ? " --init-method file://" +
                          (dir.path() / ("meet" + std::to_string(ranks))).string()
                    : "";
            CHECK(processes(dir, ranks, flags + "--threads 1 " + over + meeting) == one);
        }
    }
}

TEST_CASE("gyre eval divides the set as the training did, on any number of ranks") {
    const TempDir dir;
    make_dataset(dir.path() / "set", 43, 100, 1, 28, 28, 10);
    write_model((dir.path() / "model").string());
    processes(dir, 3, "--shards 5 --epochs 1 --threads 1 ");
    const std::string eval = "eval --threads 1 --data " + (dir.path() / "set").string() +
                             " --weights " +
                             (dir.path() / "ranks-3.run" / "last.safetensors").string();
    const auto figures = [](const Outcome& outcome) {
        INFO(outcome.output);
        REQUIRE(outcome.exit_code == 0);
        return outcome.output.substr(outcome.output.find("test loss "));
    };
    const std::string one = figures(run_gyre(0, eval));
    CHECK(figures(run_gyre(0, eval + " --shards 5")) == one);
    CHECK(figures(run_gyre(0, eval + " --virtual-ranks 5")) == one);
    CHECK(figures(run_gyre(2, eval)) == one);
    CHECK(figures(run_gyre(3, eval)) == one);
    const Outcome refused = run_gyre(3, eval + " --shards 2");
    INFO(refused.output);
    CHECK(refused.exit_code == 2);
    CHECK(count_of(refused.output, "--virtual-ranks 2: each of the 3 ranks") == 1);
}

TEST_CASE("shards on emulated GPUs give the same bits on 1 and 2 ranks, whole passes too",
          "[losses][emulated]") {
    const TempDir dir;
    make_dataset(dir.path() / "set", 31, 9, 1, 6, 6, 4);
    const std::string model = (dir.path() / "model").string();
    const std::string flags =
        "--device emulated --global-batch 9 --shards 4 --epochs 1 --threads 1 ";
    for (const int norms : {0, 1, 2}) {
        if (norms == 1) {
            write_model(model);
        } else if (norms == 2) {
            write_meeting(model);
        } else {
            std::ofstream(model) << "conv 6 k3\nrelu\ndropout 0.5\nlinear classes\n";
        }
        const Bits one = processes(dir, 1, flags);
        REQUIRE(one.losses.size() == 4);
        CHECK(processes(dir, 1, flags + "--graph on") == one);
        CHECK(processes(dir, 2, flags) == one);
    }
}
