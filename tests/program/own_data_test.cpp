// Training on data sets in other formats than IDX, with several processes at once.
#include <algorithm>
#include <iterator>
#include <sstream>
#include <string>

#include "tests/data/picture_files.hpp"
#include "tests/program/gyre_process.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/temp_dir.hpp"

using namespace gyre::test;
namespace fs = std::filesystem;

#if GYRE_HAVE_PNG

namespace {

// A bright row stands high, in the middle or low; first: of a counter that makes all differ.
void write_rows(const fs::path& directory, int count, int first) {
    constexpr const char* classes[] = {"high", "low", "middle"};
    constexpr int rows[] = {2, 12, 7};
    for (int i = 0; i < count; ++i) {
        Bytes pixels(16 * 16);
        for (std::size_t at = 0; at < pixels.size(); ++at) {
            pixels[at] = static_cast<std::uint8_t>(
                (at * 7 + static_cast<std::size_t>((first + i) * 13)) % 50);
        }
        std::fill_n(pixels.begin() + rows[i % 3] * 16, 32, std::uint8_t{250});
        write_png(directory / classes[i % 3] / (std::to_string(i) + ".png"), 1, 16, 16, pixels);
    }
}

struct Pictures {
    TempDir dir;
    fs::path set = dir.path() / "rows", cache = dir.path() / "cache";
    Pictures() {
        write_rows(set / "train", 96, 0);
        write_rows(set / "test", 30, 1000);
    }
    Outcome run(int ranks, const std::string& arguments) const {
        return run_shell("export XDG_CACHE_HOME=" + cache.string() + "; " +
                         gyre_command(ranks, arguments));
    }
    std::string train(const std::string& more = "") const {
        return "train --data " + set.string() +
               " --resize 28x28 --global-batch 16 --lr 0.05 --no-dropout --threads 1 "
               "--log-interval 1 --timeout 30 " +
               more;
    }
};

std::string losses(const Outcome& outcome) {
    std::string lines;
    std::istringstream in(outcome.output);
    for (std::string line; std::getline(in, line);) {
        if (const auto at = line.find("loss "); line.find("  step ") != line.npos) {
            lines += line.substr(at, 12) + "\n";
        }
    }
    return lines;
}

}  // namespace

TEST_CASE("two ranks that come to a folder of pictures at once", "[own-data]") {
    const Pictures pictures;
    const Outcome two = pictures.run(2, pictures.train("--epochs 3"));
    INFO(two.output);
    REQUIRE(two.exit_code == 0);
    CHECK(!losses(two).empty());
    const fs::directory_iterator files(pictures.cache / "gyre"), end;
    std::vector<std::string> names;
    std::transform(files, end, std::back_inserter(names),
                   [](const auto& entry) { return entry.path().filename().string(); });
    CHECK(names.size() == 2);  // the images, and the lock
    // From the cache, and from one rank, the same.
    const Outcome again =
        pictures.run(1, pictures.train("--epochs 3 --save " + pictures.set.string() + ".st"));
    CHECK(losses(again) == losses(two));
    const Outcome eval =
        pictures.run(2, "eval --data " + pictures.set.string() + " --resize 28x28 --weights " +
                            pictures.set.string() + ".st/best.safetensors");
    INFO(eval.output);
    CHECK(eval.exit_code == 0);
    CHECK(eval.output.find("100.00 %") != std::string::npos);
    // The weights say how pictures were brought to the net's size.
    const Outcome same = pictures.run(1, "eval --data " + pictures.set.string() + " --weights " +
                                             pictures.set.string() + ".st/best.safetensors");
    INFO(same.output);
    CHECK(same.exit_code == 0);
    CHECK(same.output.find("100.00 %") != std::string::npos);
    CHECK(same.output.find("but those of") == std::string::npos);
}

TEST_CASE("a folder val beside test decides, and the test images are evaluated once",
          "[own-data]") {
    const Pictures pictures;
    write_rows(pictures.set / "val", 24, 2000);
    const Outcome outcome = pictures.run(2, pictures.train("--epochs 2"));
    INFO(outcome.output);
    CHECK(outcome.exit_code == 0);
    CHECK(count_of(outcome.output, "val accuracy") == 3);  // of each epoch, and the best
    CHECK(count_of(outcome.output, "test accuracy") == 1);
    const Outcome without = pictures.run(1, pictures.train("--epochs 1 --no-eval"));
    INFO(without.output);
    CHECK(without.exit_code == 0);
    CHECK(count_of(without.output, "val accuracy") == 0);
    CHECK(count_of(without.output, "test accuracy") == 0);
}

TEST_CASE("what is wrong with a folder of pictures is said once", "[own-data]") {
    const Pictures pictures;
    fs::resize_file(pictures.set / "train/low/1.png", 40);
    const Outcome bad = pictures.run(2, pictures.train());
    INFO(bad.output);
    CHECK(bad.exit_code == 3);
    CHECK(count_of(bad.output, "low/1.png") == 1);
    for (const char* from : {"decoded", "from the cache"}) {
        INFO(from);
        const Outcome without = pictures.run(2, pictures.train("--skip-bad 1 --epochs 1"));
        INFO(without.output);
        CHECK(without.exit_code == 0);
        CHECK(count_of(without.output, "pictures cannot be read and are left out: ") == 1);
        CHECK(count_of(without.output, "low/1.png") == 1);
    }
    // The cache does not hide it from a run that allows none.
    CHECK(pictures.run(1, pictures.train()).exit_code == 3);
    write_png(pictures.set / "train/low/1.png", 1, 9, 16, Bytes(9 * 16));
    const Outcome mixed = pictures.run(2, "train --timeout 30 --data " + pictures.set.string());
    INFO(mixed.output);
    CHECK(mixed.exit_code == 3);
    CHECK(count_of(mixed.output, "give all of them one size with --resize") == 1);
}

TEST_CASE("a cache that cannot be written is a remark of rank 0", "[own-data]") {
    const Pictures pictures;
    write_png(pictures.cache, 1, 1, 1, {0});  // a file where the folder should be
    const Outcome two = pictures.run(2, pictures.train("--epochs 1 --no-eval"));
    INFO(two.output);
    CHECK(two.exit_code == 0);
    CHECK(count_of(two.output, "cannot keep the decoded pictures") == 1);
}

#endif
