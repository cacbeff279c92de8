// gyre replay: one step of a training, shown.
#include <fmt/format.h>

#include <cmath>
#include <fstream>
#include <sstream>

#include "data/sampler.hpp"
#include "tests/program/small_training.hpp"
#include "tests/support/catch.hpp"

using namespace gyre;
using namespace gyre::test;

namespace {

struct Shown {
    std::string text;  // from the step's line on
    double loss = 0.0;
    std::vector<std::int32_t> images;
    std::vector<double> losses;                    // of the images
    std::vector<std::pair<double, double>> norms;  // gradient and update of each parameter
    double mean() const {
        double sum = 0.0;
        for (const double image : losses) {
            sum += image;
        }
        return sum / static_cast<double>(losses.size());
    }
};

Shown replayed(int ranks, const std::string& run, int step, const std::string& flags = {}) {
    const Outcome outcome =
        run_gyre(ranks, fmt::format("replay {} --step {} {}", run, step, flags));
    INFO(outcome.output);
    REQUIRE(outcome.exit_code == 0);
    const std::string begin = fmt::format("step {}: ", step);
    const std::size_t at = outcome.output.find(begin);
    REQUIRE(at != std::string::npos);
    Shown shown;
    shown.text = outcome.output.substr(at);
    const std::size_t loss = shown.text.find("loss ");
    shown.loss = std::stod(shown.text.substr(loss + 5));
    std::istringstream lines(shown.text);
    bool norms = false;
    for (std::string line; std::getline(lines, line);) {
        norms = norms || line.starts_with("norm of");
        std::istringstream words(line);
        double position = 0.0, image = 0.0, label = 0.0, predicted = 0.0, own = 0.0;
        if (!norms && words >> position >> image >> label >> predicted >> own) {
            shown.images.push_back(static_cast<std::int32_t>(image));
            shown.losses.push_back(own);
        }
        if (const std::size_t shape = line.find(']'); norms && shape != std::string::npos) {
            std::istringstream numbers(line.substr(shape + 1));
            double weights = 0.0, gradient = 0.0, update = 0.0;
            REQUIRE(numbers >> weights >> gradient >> update);
            shown.norms.emplace_back(gradient, update);
        }
    }
    return shown;
}

constexpr double kPrinted = 1e-5;  // of losses that are printed to the sixth place

}  // namespace

TEST_CASE("a replayed step is the training's, on any number of ranks") {
    const Training training;
    const std::string run = training.file("run");
    const Training::Result result =
        training.run(2,
                     "--epochs 3 --global-batch 10 --shards 4 --lr 0.5 --momentum 0 --save-every "
                     "4steps --keep 99 --save " +
                         run);  // 6 steps an epoch
    const Shown one = replayed(0, run, 9), three = replayed(3, run, 9);
    CHECK(three.text.substr(0, one.text.size()) == one.text);
    CHECK(std::abs(one.loss - result.losses.at(8)) < kPrinted);
    CHECK(std::abs(one.mean() - one.loss) < kPrinted);
    std::vector<std::int32_t> order = data::epoch_order(Training::kTrainImages, 1, 2, true);
    CHECK(one.images == std::vector<std::int32_t>(order.begin() + 20, order.begin() + 30));
    CHECK(one.norms.size() == 6);
    for (const auto& [gradient, update] : one.norms) {
        CHECK(gradient > 0.0);
        CHECK(std::abs(update / (0.5 * gradient) - 1.0) < 1e-4);  // plain descent
    }
    // The first step, the first one of an epoch, and the last one, which has three images.
    for (const int step : {1, 7, 18}) {
        const Shown shown = replayed(0, run, step);
        CHECK(std::abs(shown.loss - result.losses.at(static_cast<std::size_t>(step - 1))) <
              kPrinted);
        CHECK(std::abs(shown.mean() - shown.loss) < kPrinted);
        CHECK(shown.images.size() == (step == 18 ? 3 : 10));
    }
    const std::string sixteenth = run + "/step-000000016.safetensors";
    const Outcome late = run_gyre(0, "replay " + run + " --step 9 --from " + sixteenth);
    INFO(late.output);
    CHECK(late.exit_code == 3);
    CHECK(count_of(late.output, "at step 16 already, after step 9") == 1);
    const Outcome beyond = run_gyre(0, "replay " + run + " --step 19");
    INFO(beyond.output);
    CHECK(beyond.exit_code == 2);
    CHECK(count_of(beyond.output, "has 18 steps") == 1);
}

TEST_CASE("a step whose shards meet in a batch normalisation is replayed on any number of ranks") {
    const Training training;
    const std::string model = training.file("normed");
    std::ofstream(model) << "conv 4 k3\nbatchnorm\nrelu\ndropout 0.3\nlinear classes\n";
    const std::string run = training.file("run");
    const Training::Result result = training.run(
        2, "--epochs 2 --global-batch 10 --shards 4 --model " + model + " --save " + run);
    const Shown one = replayed(0, run, 8), three = replayed(3, run, 8);
    CHECK(three.text.substr(0, one.text.size()) == one.text);
    CHECK(std::abs(one.loss - result.losses.at(7)) < kPrinted);
    CHECK(std::abs(one.mean() - one.loss) < kPrinted);
}

TEST_CASE("the losses of a replayed step's images add up, whatever counts in them") {
    const Training training;
    const std::string model = training.file("normed");
    std::ofstream(model) << "conv 4 k3\nbatchnorm\nrelu\ndropout 0.3\nlinear classes\n";
    const std::string run = training.file("run");
    const Training::Result result = training.run(
        2,
        "--epochs 2 --batch-size 5 --accumulate 2 --augment mixup0.4,shift1 --label-smoothing "
        "0.1 --class-weights auto --optimizer adam --max-grad-norm 1 --shard-optimizer on "
        "--lr-schedule plateau --model " +
            model + " --save " + run);
    REQUIRE(result.losses.size() > 4);
    const Shown shown = replayed(2, run, static_cast<int>(result.losses.size() / 2 + 1));
    CHECK(std::abs(shown.loss - result.losses.at(result.losses.size() / 2)) < kPrinted);
    CHECK(std::abs(shown.mean() - shown.loss) < kPrinted);
    double squares = 0.0;
    for (const auto& [gradient, update] : shown.norms) {
        squares += gradient * gradient;
    }
    CHECK(std::sqrt(squares) < 1.0 + 1e-4);  // clipped
}

TEST_CASE("a replayed step of a fused pass in a graph has its gradients") {
    const Training training;
    const std::string run = training.file("run");
    const Training::Result result =
        training.run(1,
                     "--epochs 1 --global-batch 10 --lr 0.5 --momentum 0 --device emulated "
                     "--graph on --graph-steps 4 --save " +
                         run);
    const Shown shown = replayed(0, run, 5);
    CHECK(std::abs(shown.loss - result.losses.at(4)) < kPrinted);
    CHECK(std::abs(shown.mean() - shown.loss) < kPrinted);
    for (const auto& [gradient, update] : shown.norms) {
        CHECK(std::abs(update / (0.5 * gradient) - 1.0) < 1e-4);
    }
}
