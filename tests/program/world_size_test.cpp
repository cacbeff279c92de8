// The number of ranks changes nothing: the same seed and global batch give the same losses, with
// --shards to the last bit.
#include <fstream>

#include "tests/program/small_training.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/losses.hpp"
#include "tests/support/small_dataset.hpp"
#include "tests/support/temp_dir.hpp"

using namespace gyre::test;

namespace {

// A sanitizer makes trainings slow, and sees the same accesses with one number of ranks as with
// several; whether results are the same is checked without. Emulated trainings are not repeated.
#if defined(GYRE_SANITIZED)
constexpr int kRanks[] = {3};
const std::vector<std::string> kDevices = {""};
#else
constexpr int kRanks[] = {2, 3, 4};
const std::vector<std::string> kDevices = {"", " --device emulated "};
#endif

// The losses of all steps of a training with `ranks` ranks.
std::vector<double> losses(const std::filesystem::path& dir, int ranks, const std::string& flags) {
    const auto json = dir / ("ranks-" + std::to_string(ranks) + ".jsonl");
    const Outcome outcome =
        run_gyre(ranks, "train --data " + (dir / "set").string() + " --metrics " + json.string() +
                            " --log-interval 1 --threads 1 " + flags);
    INFO(outcome.output);
    REQUIRE(outcome.exit_code == 0);
    CHECK(read_events(json, "start").at(0).at("ranks") == ranks);
    return step_losses(json);
}

// 743 images: the last batch of an epoch is uneven for every global batch used here.
void make_set(const TempDir& dir) {
    make_dataset(dir.path() / "set", 743, 100, 1, 28, 28, 10);
}

// The same bits, of the default net.
void check_bits(std::string flags, std::size_t steps) {
    flags += " --shards 4";
    const TempDir dir;
    make_set(dir);
    const std::vector<double> one = losses(dir.path(), 1, flags);
    REQUIRE(one.size() == steps);
    CHECK(one.back() < 0.9 * one.front());  // it does learn, so the losses are worth comparing
    for (const int ranks : kRanks) {
        INFO(ranks << " ranks");
        CHECK(losses(dir.path(), ranks, flags) == one);
    }
}

}  // namespace

TEST_CASE("50 steps with dropout and an uneven last batch are the same for 1 to 4 ranks",
          "[losses]") {
    // 743 = 12 * 60 + 23: 13 steps an epoch; 4 epochs are 52 steps.
    check_bits("--global-batch 60 --epochs 4 --seed 7 --lr 0.1", 52);
}

TEST_CASE("augmented images are the same for any number of ranks", "[losses]") {
    check_bits(
        "--global-batch 60 --epochs 4 --seed 7 --lr 0.1 "
        "--augment "
        "randomresizedcrop30,rotate5,shift1,crop1,cutout4,randomerasing50,mixup0.5,cutmix1",
        52);
}

TEST_CASE("several buckets and Adam change nothing either", "[losses]") {
    check_bits("--global-batch 60 --epochs 4 --optimizer adam --bucket-kib 1 --seed 7", 52);
}

TEST_CASE("without shards the number of ranks changes what sums are rounded to, no more",
          "[losses]") {
    const TempDir dir;
    make_set(dir);
    for (const std::string& some :
         {std::string("--global-batch 60 --epochs 4 --seed 7 --lr 0.05"),
          // 531 = 10 * 53 + 1: the last step leaves ranks without images.
          std::string("--global-batch 53 --epochs 1 --limit 531 --lr 0.1 --seed 3")}) {
        const std::string flags = some + kSmoothNet;
        const std::vector<double> one = losses(dir.path(), 1, flags);
        CHECK(one.back() < 0.9 * one.front());
        for (const int ranks : kRanks) {
            const double worst = largest_difference(losses(dir.path(), ranks, flags), one);
            INFO(ranks << " ranks, " << flags << ": largest difference " << worst);
            CHECK(worst <= kSameLosses);
        }
    }
}

TEST_CASE("a batch in several passes is the same batch", "[losses]") {
    const TempDir dir;
    make_set(dir);
    const std::string common = "--epochs 2 --seed 7 --lr 0.05" + kSmoothNet;
    const std::vector<double> one = losses(dir.path(), 1, common + "--batch-size 120");
    for (const std::string& device : kDevices) {
        std::vector<double> expected = one;
        if (!device.empty()) {
            expected.resize(one.size() / 2);
        }
        const std::string flags =
            device.empty() ? common : "--epochs 1 --seed 7 --lr 0.05" + kSmoothNet + device;
        for (const std::string& parts : {std::string("--batch-size 20 --accumulate 3"),
                                         std::string("--global-batch 120 --accumulate 7")}) {
            const auto found = losses(dir.path(), 2, flags + parts);
            const double worst = largest_difference(found, expected);
            INFO(parts << ": largest difference " << worst);
            CHECK(worst <= kSameLosses);
        }
    }
}

// Ten images of three ranks are shares of 4, 3 and 3, and their passes of 6 and 4 images; one
// rank's are of 5 and 5. All images are the same, so a pass's statistics are, whichever of them it
// has.
TEST_CASE("batch normalisation counts the images of all ranks' passes", "[losses]") {
    constexpr int kImages = 30;
    const Training training;
    std::vector<std::uint8_t> pixels, labels;
    for (std::uint32_t i = 0; i < kImages; ++i) {
        labels.push_back(static_cast<std::uint8_t>(i % 3));
        for (std::uint32_t at = 0; at < 36; ++at) {
            pixels.push_back(static_cast<std::uint8_t>(at * at % 251));
        }
    }
    const std::filesystem::path set = training.data();
    for (const char* part : {"train", "test"}) {
        const std::string stem = (set / part).string();
        write_idx(stem + "-images-idx4-ubyte", array_of(IdxType::u8, {kImages, 1, 6, 6}, pixels));
        write_idx(stem + "-labels-idx1-ubyte", labels_of(labels));
    }
    std::ofstream(training.model()) << "conv 4 k3\nbatchnorm\nconv 4 k3\nlinear classes\n";
    const std::string flags = "--no-eval --epochs 4 --lr 0.1 --global-batch 10 --accumulate 2";
    const std::vector<double> one = training.run(1, flags).losses;
    REQUIRE(one.size() == 12);
    CHECK(one.back() < one.front());
    const double worst = largest_difference(training.run(3, flags).losses, one);
    INFO("largest difference " << worst);
    CHECK(worst <= kSameLosses);
}

TEST_CASE("gathered factors give what reduced gradients give, for any number of ranks",
          "[losses]") {
    const TempDir dir;
    make_set(dir);
    const std::string model = (dir.path() / "model").string();
    std::ofstream(model) << "conv 4 k5 s2\nlinear 600\ndropout 0.5\n"
                            "linear 40\nlinear classes\n";  // as smooth as kSmoothNet
    // 743 = 14 * 53 + 1: the last step leaves ranks without images.
    for (const std::string& flags :
         {std::string("--global-batch 53 --epochs 2 --seed 5"),
          std::string("--global-batch 60 --epochs 1 --optimizer adam --bucket-kib 16 --seed 6")}) {
        const std::string common = flags + " --model " + model;
        const std::vector<double> one = losses(dir.path(), 1, common);
        for (const int ranks : kRanks) {
            const auto several =
                losses(dir.path(), ranks, common + " --factors on --virtual-ranks 0");
            const double worst = largest_difference(several, one);
            INFO(ranks << " ranks, " << flags << ": largest difference " << worst);
            CHECK(worst <= kSameLosses);
        }
    }
    const Outcome verbose =
        run_gyre(2,
                 "train --threads 1 --no-eval --epochs 1 --batch-size 8 --check-sync 5 -v "
                 "--factors on --virtual-ranks 0 --data " +
                     (dir.path() / "set").string() + " --model " + model);
    INFO(verbose.output);
    CHECK(verbose.exit_code == 0);
    CHECK(verbose.output.find("fc1: ") != std::string::npos);
    CHECK(verbose.output.find("of factors gathered") != std::string::npos);
    CHECK(verbose.output.find("fc3: ") == std::string::npos);  // too small to gain anything
}

TEST_CASE("updates that ranks share out give what every rank's own give", "[losses]") {
    const TempDir dir;
    make_set(dir);
    const std::string model = (dir.path() / "model").string();
    std::ofstream(model) << "conv 4 k5 s2\nlinear 600\ndropout 0.5\n"
                            "linear 40\nlinear classes\n";  // as smooth as kSmoothNet
    for (const std::string& rule :
         {std::string("--optimizer adam"), std::string("--momentum 0.9 --bucket-kib 64")}) {
        const std::string common = rule +
                                   " --global-batch 53 --epochs 2 --seed 5 --check-sync 5 "
                                   "--factors off --model " +
                                   model;
        const std::vector<double> one = losses(dir.path(), 1, common);
        // A sum of two terms has one order, so that every bit is the same; with more ranks MPI
        // adds up in an order of its own, and shares in that of the ranks.
        CHECK(losses(dir.path(), 1, common + " --shard-optimizer on") == one);
        CHECK(losses(dir.path(), 2, common + " --shard-optimizer on") ==
              losses(dir.path(), 2, common + " --shard-optimizer off"));
        for (const int ranks : {3, 4}) {
            const auto several = losses(dir.path(), ranks, common + " --shard-optimizer on");
            const double worst = largest_difference(several, one);
            INFO(ranks << " ranks, " << rule << ": largest difference " << worst);
            CHECK(worst <= kSameLosses);
        }
    }
}

TEST_CASE("gradients in 16 bits train as well, within what their rounding allows", "[losses]") {
    const TempDir dir;
    make_set(dir);
    for (const std::string& device : kDevices) {
        const std::string common =
            "--limit 600 --global-batch 60 --epochs 1 --seed 7 --lr 0.05" + kSmoothNet + device;
        const auto full = losses(dir.path(), 2, common);
        for (const auto& [type, bound] : {std::pair{"bf16", 0x1p-8}, std::pair{"fp16", 0x1p-11}}) {
            const auto narrow = losses(dir.path(), 2, common + " --comm-dtype " + type);
            const double worst = largest_difference(narrow, full);
            INFO(type << device << ": largest difference " << worst);
            CHECK(worst > 0.0);  // it is not the same
            CHECK(narrow.front() ==
                  full.front());  // the first loss is before any update, and exact
            CHECK(worst <= bound);
        }
        CHECK(losses(dir.path(), 1, common + " --comm-dtype bf16") ==
              losses(dir.path(), 1, common));  // nothing travels
    }
}

TEST_CASE("20 steps on emulated CUDA give the CPU's losses, on 1 and 2 ranks",
          "[losses][emulated]") {
    const TempDir dir;
    make_set(dir);
    for (const std::string& flags :
         {std::string("--lr 0.05"), std::string("--optimizer adam --bucket-kib 1")}) {
        const double worst = least_difference(1e-4, [&](int seed) {
            const std::string common = "--limit 630 --global-batch 32 --epochs 1 " + flags +
                                       " --seed " + std::to_string(seed);
            const std::vector<double> cpu = losses(dir.path(), 1, common);
            REQUIRE(cpu.size() == 20);
            double difference = 0.0;
            for (const int ranks : {1, 2}) {
                const auto emulated = losses(dir.path(), ranks, "--device emulated " + common);
                difference = std::max(difference, largest_difference(emulated, cpu));
                // The same again, to the last bit, as a graph where it can be one.
                const std::string graph = ranks == 1 ? "--graph on " : "";
                CHECK(losses(dir.path(), ranks, "--device emulated " + graph + common) == emulated);
            }
            return difference;
        });
        INFO(flags << ": largest difference " << worst);
        CHECK(worst <= 1e-4);
    }
}
