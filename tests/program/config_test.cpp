// --config: settings under a name or in a file, beside those of the command line.
#include <algorithm>
#include <fstream>
#include <string>
#include <vector>

#include "base/error.hpp"
#include "model/safetensors.hpp"
#include "tests/program/gyre_process.hpp"
#include "tests/program/small_training.hpp"
#include "tests/support/catch.hpp"
#include "train/cli/command_line.hpp"
#include "train/cli/config.hpp"

using namespace gyre;
using namespace gyre::train;
using namespace gyre::test;

namespace {

// The settings that `gyre WORDS` makes of its words.
struct Program {
    CLI::App app;
    RunSpec options;
    explicit Program(const std::vector<std::string>& words) {
        add_flags(*app.add_subcommand("train"), train_flags(options));
        std::vector<std::string> all = with_config(app, translate_arguments(app, words));
        std::reverse(all.begin(), all.end());
        app.parse(std::move(all));
    }
};

std::string refusal(const std::vector<std::string>& words) {
    try {
        const Program program(words);
    } catch (const Error& error) {
        CHECK(error.code() == ExitCode::usage);
        return error.what();
    }
    return "nothing";
}

struct File {
    TempDir dir;
    std::string path = (dir.path() / "config.toml").string();
    explicit File(const std::string& text) { std::ofstream(path) << text; }
};

}  // namespace

TEST_CASE("the settings of a configuration are those of a command line") {
    const File file(
        "# what for\n\nepochs = 3  # short\n  lr=0.25\nno_dropout = true\nbetas = [0.5, 0.75]\n"
        "optim = \"adam\"\n");
    for (const char* flag : {"--config", "--recipe"}) {
        const Program program({"train", flag, file.path});
        CHECK(program.options.stop.epochs == 3);
        CHECK(program.options.optimizer.learning_rate == 0.25f);
        CHECK(!program.options.net.dropout);
        CHECK(program.options.optimizer.betas == std::array{0.5f, 0.75f});
        CHECK(program.options.optimizer.rule == UpdateRule::adam);
    }
}

TEST_CASE("flags of the command line override a configuration's, before and after it") {
    const File file("epochs = 3\nglobal-batch = 96\nlr = 0.25\ndevice = \"cuda\"\n");
    const Program program({"train", "--epochs", "5", "--config=" + file.path, "--batch_size=7",
                           "--lr=0.5", "--no-cuda"});
    CHECK(program.options.stop.epochs == 5);
    CHECK(program.options.batch.batch_size == 7);
    CHECK(!program.options.batch.global_batch);
    CHECK(program.options.optimizer.learning_rate == 0.5f);
    CHECK(program.options.device.device == "cpu");
}

TEST_CASE("a later configuration overrides an earlier one") {
    const File file("epochs = 5\nbatch-size = 7\n");
    const Program program({"train", "--config", "mnist99", "--config", file.path});
    CHECK(program.options.stop.epochs == 5);
    CHECK(program.options.batch.batch_size == 7);
    CHECK(!program.options.batch.global_batch);
    CHECK(program.options.optimizer.rule == UpdateRule::adam);
}

TEST_CASE("every configuration of gyre's own can be parsed, and stands in --help") {
    REQUIRE(!config_names().empty());
    for (const std::string& name : config_names()) {
        const Program program({"train", "--config", name});
        CHECK(program.options.optimizer.learning_rate.has_value());
        CHECK(program.app.get_subcommand("train")->help().find(name) != std::string::npos);
    }
}

TEST_CASE("cifar10: the norms' scales and the whitening filters stay, and the head begins small") {
    const TempDir dir;
    const std::string set = (dir.path() / "set").string(), run = (dir.path() / "run").string();
    make_dataset(set, 40, 20, 3, 32, 32, 10);
    const Outcome outcome =
        run_gyre(2, "train --config cifar10 --threads 1 --epochs 1 --global-batch 20 --data " +
                        set + " --save " + run);
    INFO(outcome.output);
    REQUIRE(outcome.exit_code == 0);
    for (const HostTensor& tensor : read_safetensors(run + "/last.safetensors").tensors) {
        INFO(tensor.name);
        const std::vector<float>& v = tensor.values;
        if (tensor.name.starts_with("bn") && tensor.name.ends_with(".weight")) {
            CHECK(std::ranges::count(v, 1.0f) == std::ssize(v));
        } else if (tensor.name == "conv1.weight") {
            REQUIRE(v.size() == 24 * 12);
            CHECK(std::equal(v.begin(), v.begin() + 12 * 12, v.begin() + 12 * 12,
                             [](float a, float b) { return a == -b; }));
        } else if (tensor.name == "fc1.weight") {  // the largest of 2,560 draws is almost 1/16
            CHECK(std::ranges::max(v) < 0.5f / 16);
        }
    }
}

TEST_CASE("a configuration that is none is refused, with its line") {
    const File unknown("epochs = 3\nepcohs = 3\n"), value("lr = 0.1\n\nepochs = \"many\"\n"),
        nested("recipe = \"mnist99\"\n");
    const std::string first = "config ";
    CHECK(refusal({"train", "--config", unknown.path})
              .starts_with(first + unknown.path +
                           ", line 2: gyre train has no flag --epcohs; did you mean --epochs?"));
    CHECK(refusal({"train", "--config", value.path}) ==
          first + value.path + ", line 3: --epochs: 'many' must be a number >= 1");
    CHECK(refusal({"train", "--config", nested.path}) ==
          first + nested.path + ", line 1: a file cannot name another");
    CHECK(refusal({"train", "--config", "mnist9"}).ends_with("; did you mean mnist99?"));
    CHECK(refusal({"train", "--config", value.dir.path().string()})
              .find("not a file that can be read") != std::string::npos);
}
