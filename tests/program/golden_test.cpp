// Every optimiser and its options against series of losses that PyTorch gave, wherever there is
// none here: golden_losses.json, written by torch_parity.py --write-golden in float64. The net is
// as smooth as smooth.model, so no processor's rounding can flip a choice in it (measured: 1.6e-7
// at most).
#include <cmath>
#include <fstream>

#include "tests/support/catch.hpp"
#include "tests/support/losses.hpp"
#include "tests/support/temp_dir.hpp"

using namespace gyre::test;

namespace {

struct Golden {
    TempDir dir;
    nlohmann::json series;
    std::string common;  // flags of all series

    Golden() {
        const auto golden =
            nlohmann::json::parse(std::ifstream(built_file("tests/golden_losses.json")));
        series = golden.at("series");
        const auto& set = golden.at("data");
        make_dataset(dir.path() / "set", set.at("images"), 10, 1, set.at("side"), set.at("side"),
                     set.at("classes"));
        std::ofstream(dir.path() / "model") << golden.at("model").get<std::string>();
        common = "train --threads 1 --data " + (dir.path() / "set").string() + " --model " +
                 (dir.path() / "model").string() + " --metrics " + (dir.path() / "json").string() +
                 " " + golden.at("flags").get<std::string>();
    }
};

}  // namespace

TEST_CASE("every optimiser and option gives PyTorch's losses", "[losses]") {
    const Golden golden;
    for (const auto& series : golden.series) {
        for (const char* device : {"cpu", "emulated"}) {
            const std::string flags = series.at("flags");
            INFO(flags << " --device " << device);
            const Outcome outcome =
                run_gyre(0, golden.common + " --device " + device + " " + flags);
            INFO(outcome.output);
            REQUIRE(outcome.exit_code == 0);
            const double worst =
                largest_difference(step_losses(golden.dir.path() / "json"), series.at("losses"));
            INFO("largest difference " << worst);
            CHECK(worst <= kSameLosses);
        }
    }
}

TEST_CASE("every schedule gives the rates of PyTorch's schedulers, step by step") {
    const auto golden = nlohmann::json::parse(std::ifstream(built_file("tests/golden_rates.json")));
    const double lr = golden.at("lr");
    const int epochs = golden.at("epochs"), steps = golden.at("steps");
    const TempDir dir;
    const auto json = dir.path() / "json";
    make_dataset(dir.path() / "set", 3 * steps - 1, 4, 1, 4, 4, 2);
    std::ofstream(dir.path() / "model") << "linear classes\n";
    REQUIRE(golden.at("series").size() >= 7);
    for (const auto& series : golden.at("series")) {
        const std::string flags = series.at("flags");
        INFO(flags);
        const Outcome outcome = run_gyre(
            0, "train --threads 1 --no-eval --batch-size 3 --log-interval 1 --data " +
                   (dir.path() / "set").string() + " --model " + (dir.path() / "model").string() +
                   " --metrics " + json.string() + " --lr " + std::to_string(lr) + " --epochs " +
                   std::to_string(epochs) + " " + flags);
        INFO(outcome.output);
        REQUIRE(outcome.exit_code == 0);
        const std::vector<double> expected = series.at("rates");
        const auto events = read_events(json, "step");
        REQUIRE(events.size() == expected.size());
        REQUIRE(events.size() == static_cast<std::size_t>(epochs * steps));
        for (std::size_t i = 0; i < expected.size(); ++i) {
            // A float, of a formula with up to 8 roundings a step in double precision.
            const double bound = 0x1p-24 * expected[i] + lr * 0x1p-45;
            CHECK(std::abs(events[i].at("learning_rate").get<double>() - expected[i]) <= bound);
        }
    }
}

TEST_CASE("PyTorch's losses tell any two optimisers or options apart", "[losses]") {
    const Golden golden;
    REQUIRE(golden.series.size() >= 14);
    for (const auto& a : golden.series) {
        for (const auto& b : golden.series) {
            if (&a != &b) {
                INFO(a.at("flags") << " and " << b.at("flags"));
                CHECK(largest_difference(a.at("losses"), b.at("losses")) > 20 * kSameLosses);
            }
        }
    }
}
