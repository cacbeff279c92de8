// Tables of gyre eval, and gyre predict.
#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <map>
#include <sstream>

#include "data/idx.hpp"
#include "tests/data/picture_files.hpp"
#include "tests/program/gyre_process.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/temp_dir.hpp"
#include "train/cli/class_report.hpp"

using namespace gyre::test;
namespace fs = std::filesystem;

namespace {

struct Trained {
    TempDir dir;
    std::string data = file("set"), weights = file("run/last.safetensors");
    Trained() {
        make_dataset(data, 200, 60, 1, 28, 28, 4);
        const Outcome outcome =
            run_gyre(0, "train --threads 1 --epochs 1 --lr 0.03 --batch-size 20 --data " + data +
                            " --save " + file("run"));
        INFO(outcome.output);
        REQUIRE(outcome.exit_code == 0);
    }
    std::string file(const std::string& name) const { return (dir.path() / name).string(); }
};

// The numbers of the lines after the one that begins so.
std::vector<std::vector<double>> rows_after(const std::string& text, const std::string& head) {
    std::vector<std::vector<double>> rows;
    std::istringstream in(text);
    bool found = false;
    for (std::string line; std::getline(in, line);) {
        if (found && line.empty()) {
            break;
        }
        if (found) {
            line.erase(std::remove(line.begin(), line.end(), '%'), line.end());
            std::istringstream cells(line);
            rows.emplace_back();
            for (double value; cells >> value;) {
                rows.back().push_back(value);
            }
        }
        found = found || line.starts_with(head);
    }
    return rows;
}

}  // namespace

TEST_CASE("gyre eval's tables add up, on any number of ranks") {
    const Trained trained;
    std::string first;
    for (const int ranks : {0, 1, 3}) {
        const Outcome outcome =
            run_gyre(ranks, "eval --threads 1 --test-batch-size 7 --per-class --confusion --data " +
                                trained.data + " --weights " + trained.weights);
        INFO(outcome.output);
        REQUIRE(outcome.exit_code == 0);
        const auto classes = rows_after(outcome.output, "class ");
        const auto pairs = rows_after(outcome.output, "is \\ taken");
        REQUIRE(classes.size() == 4);
        REQUIRE(pairs.size() == 4);
        double all = 0.0, hits = 0.0;
        for (std::size_t k = 0; k < 4; ++k) {
            REQUIRE(pairs[k].size() == 5);  // the class itself, and four predictions
            double images = 0.0, taken = 0.0;
            for (std::size_t p = 0; p < 4; ++p) {
                images += pairs[k][1 + p];
                taken += pairs[p][1 + k];
            }
            CHECK(classes[k][1] == images);
            if (images > 0) {
                CHECK(classes[k][2] == Approx(100 * pairs[k][1 + k] / images).margin(0.0051));
            }
            if (taken > 0) {
                CHECK(classes[k].back() == Approx(100 * pairs[k][1 + k] / taken).margin(0.0051));
            }
            all += images;
            hits += pairs[k][1 + k];
        }
        CHECK(count_of(outcome.output, "(" + std::to_string(int(hits)) + "/" +
                                           std::to_string(int(all)) + ")") == 1);
        const std::string tables = outcome.output.substr(outcome.output.find("class "));
        first = first.empty() ? tables : first;
        CHECK(tables == first);
    }
}

TEST_CASE("gyre predict takes the images of a test set for what its accuracy counts") {
    const Trained trained;
    const std::string images = trained.data + "/test-images-idx4-ubyte";
    const std::string predict = "predict --threads 1 --weights " + trained.weights + " ";
    REQUIRE(fs::exists(images));
    const gyre::data::IdxArray labels =
        gyre::data::read_idx(trained.data + "/test-labels-idx1-ubyte");
    const Outcome outcome = run_gyre(0, predict + images + " --csv --top 9");
    INFO(outcome.output);
    REQUIRE(outcome.exit_code == 0);
    std::istringstream in(outcome.output);
    std::string line;
    std::getline(in, line);
    CHECK(line == "image,place,class,name,probability");
    int hits = 0;
    double sum = 0.0;
    for (int i = 0; i < 60 * 4; ++i) {  // of all classes
        REQUIRE(std::getline(in, line));
        std::istringstream cells(line);
        std::string image, place, number, name, probability;
        for (std::string* cell : {&image, &place, &number, &name, &probability}) {
            std::getline(cells, *cell, ',');
        }
        CHECK(image == images + "[" + std::to_string(i / 4) + "]");
        CHECK(place == std::to_string(i % 4 + 1));
        sum += std::stod(probability);
        const int label = static_cast<int>(labels.payload[static_cast<std::size_t>(i / 4)]);
        hits += place == "1" && number == std::to_string(label) ? 1 : 0;
    }
    CHECK(!std::getline(in, line));
    CHECK(sum == Approx(60.0).margin(60 * 4 * 5e-7));  // of six digits each
    const Outcome eval =
        run_gyre(0, "eval --threads 1 --data " + trained.data + " --weights " + trained.weights);
    CHECK(count_of(eval.output, "(" + std::to_string(hits) + "/60)") == 1);

    const auto refuse = [&](const std::string& flags, const std::string& part) {
        const Outcome refused = run_gyre(0, flags);
        INFO(refused.output);
        CHECK(refused.exit_code == 3);
        CHECK(count_of(refused.output, part) == 1);
    };
    refuse(predict + "none.png", "none.png");
    // The images of the files that can be read are predicted all the same, in their order.
    const Outcome some = run_shell(gyre_command(
        0, predict + "none.gz " + images + " cat.gif --csv --top 9 2> " + trained.file("errors")));
    CHECK(some.exit_code == 3);
    CHECK(some.output == outcome.output);
    const std::string errors = file_bytes(trained.file("errors"));
    INFO(errors);
    CHECK(
        errors.starts_with("gyre: none.gz: no such file\ngyre: cat.gif: only PNG, JPEG and WebP"));
    CHECK(count_of(errors, "\n") == 2);
    refuse(predict + trained.data + "/test-labels-idx1-ubyte", "not images");
    refuse(predict + "cat.gif", "only PNG, JPEG and WebP pictures are read");
    refuse("predict --weights " + images + " " + images, "test-images");
}

TEST_CASE("gyre predict's images, channels and probabilities are those of gyre eval") {
    // Colours that mean something, in images that are not square, and more than one pass has.
    const TempDir dir;
    const std::string set = dir.file("set"), weights = dir.file("run") + "/last.safetensors";
    constexpr int kImages = 1100, kHeight = 14, kWidth = 21, kClasses = 3;
    make_dataset(set, 60, kImages, 3, kHeight, kWidth, kClasses);
    const std::string norm = " --mean 0.1,0.4,0.7 --std 0.1,0.5,2";
    std::ofstream(dir.file("model")) << "conv 4 k3\nrelu\nmaxpool 2\nlinear classes\n";
    REQUIRE(run_gyre(0, "train --threads 1 --epochs 1 --batch-size 20 --data " + set + norm +
                            " --model " + dir.file("model") + " --no-eval --save " +
                            dir.file("run"))
                .exit_code == 0);
    const std::string images = set + "/test-images-idx4-ubyte";
    const auto labels = gyre::data::read_idx(set + "/test-labels-idx1-ubyte").payload;
    // The probability of each class, by line of the output: [image][class].
    const auto predict = [&](const std::string& what, int top, const std::string& flags = "") {
        const Outcome outcome =
            run_gyre(0, "predict --threads 1 --csv --top " + std::to_string(top) + " --weights " +
                            weights + " " + what + flags);
        INFO(outcome.output.substr(0, 1000));
        REQUIRE(outcome.exit_code == 0);
        std::vector<std::map<int, double>> all;
        std::istringstream in(outcome.output);
        std::string line;
        std::getline(in, line);
        for (int i = 0; std::getline(in, line); ++i) {
            if (i % top == 0) {
                all.emplace_back();
            }
            std::istringstream cells(line);
            std::string image, place, number, name, probability;
            for (std::string* cell : {&image, &place, &number, &name, &probability}) {
                std::getline(cells, *cell, ',');
            }
            if (what == images) {
                CHECK(image == images + "[" + std::to_string(i / top) + "]");
            }
            all.back()[std::stoi(number)] = std::stod(probability);
        }
        return all;
    };
    const auto check_loss = [&](const std::string& flags) {
        const auto all = predict(images, kClasses, flags);
        REQUIRE(all.size() == kImages);
        double loss = 0.0;
        for (std::size_t i = 0; i < all.size(); ++i) {
            loss -= std::log(all[i].at(static_cast<int>(labels[i]))) / kImages;
        }
        const Outcome eval =
            run_gyre(0, "eval --threads 1 --data " + set + " --weights " + weights + flags);
        const auto at = eval.output.find("test loss ");
        INFO(eval.output);
        REQUIRE(at != eval.output.npos);
        CHECK(loss == Approx(std::stod(eval.output.substr(at + 10))).margin(1e-4));
        return all;
    };
    const auto all = check_loss("");
    CHECK(check_loss(" --tta hflip") != all);
    // The first place has the share that it has of all classes.
    const auto first = predict(images, 1);
    REQUIRE(first.size() == kImages);
    for (std::size_t i = 0; i < all.size(); ++i) {
        REQUIRE(first[i].size() == 1);
        CHECK(all[i].at(first[i].begin()->first) == first[i].begin()->second);
    }
#if GYRE_HAVE_PNG
    // A picture has its channels and rows where an IDX file has them.
    const auto pixels = gyre::data::read_idx(images).payload;
    Bytes picture;
    for (int i = 0; i < kHeight * kWidth * 3; ++i) {
        picture.push_back(static_cast<std::uint8_t>(
            pixels[static_cast<std::size_t>(i % 3 * kHeight * kWidth + i / 3)]));
    }
    write_png(dir.file("first.png"), 3, kHeight, kWidth, picture);
    CHECK(predict(dir.file("first.png"), kClasses) == std::vector{all[0]});
#endif
}

TEST_CASE("gyre eval meets as gyre train does, without a launcher, too") {
    const Trained trained;
    const std::string eval =
        "eval --threads 1 --no-cuda --data " + trained.data + " --weights " + trained.weights;
    const Outcome alone = run_gyre(0, eval);
    REQUIRE(count_of(alone.output, "test loss ") == 1);
    const std::string rank = gyre_binary() + " " + eval + " --comm gloo --init-method file://" +
                             trained.file("meeting") + " --job-id one --world-size 2 --rank ";
    const Outcome both = run_shell(rank + "1 & " + rank + "0 && wait $!");
    INFO(both.output);
    CHECK(both.exit_code == 0);
    CHECK(count_of(both.output, alone.output.substr(alone.output.find("test loss "))) == 1);
    const Outcome missing = run_shell(rank + "0 --init-timeout 1");
    INFO(missing.output);
    CHECK(missing.exit_code == 4);
    CHECK(count_of(missing.output, "missing: rank 1") == 1);
}

TEST_CASE("gyre eval, predict and plan compute where and in what they are told to") {
    const Trained trained;
    const std::string weights = " --threads 1 --weights " + trained.weights + " ";
    const std::string eval = "eval --data " + trained.data + weights;
    // The loss of eval, or the probabilities that predict prints.
    const auto numbers = [](const std::string& command) {
        const Outcome outcome = run_gyre(0, command);
        INFO(command << "\n" << outcome.output);
        REQUIRE(outcome.exit_code == 0);
        std::vector<double> found;
        std::istringstream in(outcome.output);
        for (std::string line; std::getline(in, line);) {
            if (line.starts_with("test loss ")) {
                found.push_back(std::stod(line.substr(10)));
            } else if (const auto comma = line.rfind(',');
                       comma != line.npos && line.back() != 'y') {
                found.push_back(std::stod(line.substr(comma + 1)));
            }
        }
        return found;
    };
    // Their greatest difference from the CPU's in fp32.
    const auto difference = [&](const std::string& command, const std::string& flags) {
        const std::vector<double> cpu = numbers(command), other = numbers(command + flags);
        REQUIRE(!cpu.empty());
        REQUIRE(other.size() == cpu.size());
        double worst = 0.0;
        for (std::size_t i = 0; i < cpu.size(); ++i) {
            worst = std::max(worst, std::abs(cpu[i] - other[i]));
        }
        return worst;
    };
    const std::string predict =
        "predict --csv --top 4 " + trained.data + "/test-images-idx4-ubyte" + weights;
    const double printed = 1.5e-6;  // six digits, both rounded
    const std::string gpu = "--device emulated ";
    CHECK(difference(eval, gpu + "--kernels ours --deterministic --share-gpu") <= printed);
    CHECK(difference(predict, gpu) <= printed);
    // Each of the net's four layers rounds once more, by half of an epsilon of the 16 bits.
    const double bf16 = 4 * 0x1p-8, fp16 = 4 * 0x1p-11;
    CHECK(difference(eval, gpu + "--precision bf16") <= bf16);
    CHECK(difference(eval, "--precision fp16") <= fp16);
    for (const auto& [flags, bound] : {std::pair(gpu + "--precision bf16", bf16),
                                       std::pair(std::string("--precision fp16"), fp16)}) {
        const double rounded = difference(predict, flags);
        CHECK(rounded > 0.0);  // of 240 numbers
        CHECK(rounded <= bound);
    }

    const auto refuse = [&](const std::string& flags, const std::string& part) {
        const Outcome refused = run_gyre(0, eval + flags);
        INFO(refused.output);
        CHECK(refused.exit_code == 2);
        CHECK(count_of(refused.output, part) == 1);
    };
    refuse("--device emulated --kernels cudnn", "--kernels ours");
    refuse("--device emulated --kernels auto --kernels-cache ''", "the path is empty");
    refuse("--flight-record ''", "the path is empty");

    const Outcome plan = run_gyre(0,
                                  "plan --device emulated --precision bf16 --threads 1 --batch 2 "
                                  "--ranks 8 --bandwidth 1Gb --latency 20us");
    INFO(plan.output);
    CHECK(plan.exit_code == 0);
    CHECK(count_of(plan.output, "on emulated GPU") == 1);
}

#if GYRE_HAVE_PNG
TEST_CASE("gyre predict reads pictures, of any size, and knows their classes' names") {
    TempDir dir;
    const std::string set = (dir.path() / "set").string();
    const auto path = [&](const char* part, const char* name, int i) {
        return fs::path(set) / part / name / (std::to_string(i) + ".png");
    };
    for (int i = 0; i < 60; ++i) {
        for (const char* name : {"dark", "light, very"}) {
            const auto level = static_cast<std::uint8_t>((name[0] == 'd' ? 20 : 200) + i % 30);
            write_png(path(i < 50 ? "train" : "test", name, i), 1, 28, 28, Bytes(28 * 28, level));
        }
    }
    const std::string environment =
        "export XDG_CACHE_HOME=" + (dir.path() / "cache").string() + "; ";
    const std::string run = (dir.path() / "run").string();
    const Outcome trained = run_shell(
        environment + gyre_command(0, "train --threads 1 --epochs 3 --batch-size 10 --data " + set +
                                          " --save " + run));
    INFO(trained.output);
    REQUIRE(trained.exit_code == 0);
    const fs::path large = dir.path() / "large.png", coloured = dir.path() / "coloured.png";
    write_png(large, 1, 70, 50, Bytes(70 * 50, 220));
    write_png(coloured, 3, 28, 28, Bytes(28 * 28 * 3, 220));
    const std::string predict = "predict --weights " + run + "/last.safetensors --top 1 ";
    const Outcome outcome =
        run_gyre(0, predict + path("test", "dark", 55).string() + " " + large.string());
    INFO(outcome.output);
    CHECK(outcome.exit_code == 0);
    CHECK(count_of(outcome.output, "55.png  dark ") == 1);
    CHECK(count_of(outcome.output, "large.png  light, very ") == 1);
    CHECK(count_of(run_gyre(0, predict + "--csv " + large.string()).output,
                   ",1,1,\"light, very\",") == 1);
    const Outcome refused = run_gyre(0, predict + coloured.string());
    INFO(refused.output);
    CHECK((refused.exit_code == 3 || count_of(refused.output, "coloured.png  ") == 1));
}
#endif

TEST_CASE("of equal logits the first is the prediction, and a class without images has no share") {
    const std::vector<float> logits = {1, 2, 2, 0, 0, 0};
    CHECK(gyre::train::predicted_class(logits.data(), 3) == 1);
    CHECK(gyre::train::predicted_class(logits.data() + 3, 3) == 0);
    gyre::train::ClassCounts counts(3, false);
    const std::int32_t labels[] = {1, 1};
    counts.add(logits, labels, 2);
    const std::string table = counts.table(gyre::train::class_labels({"first", "second"}, 3));
    INFO(table);
    CHECK(count_of(table, "second         2    50.00 %   100.00 %") == 1);
    CHECK(count_of(table, "2              0          -          -") == 1);
}
