// Recipes: flags under a name or in a file, beside those of the command line.
#include <fstream>
#include <string>
#include <vector>

#include "kernels/base/error.hpp"
#include "tests/catch.hpp"
#include "tests/small_training.hpp"
#include "train/cli/command_line.hpp"
#include "train/cli/recipe.hpp"

using namespace gyre;
using namespace gyre::train;
using namespace gyre::test;

namespace {

// What `gyre WORDS` makes of its words.
struct Program {
    CLI::App app;
    TrainOptions options;
    explicit Program(const std::vector<std::string>& words) {
        add_train_flags(*app.add_subcommand("train"), options);
        std::vector<std::string> all = with_recipe(app, translate_arguments(app, words));
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
    std::string path = (dir.path() / "recipe").string();
    explicit File(const std::string& text) { std::ofstream(path) << text; }
};

}  // namespace

TEST_CASE("a recipe's flags are those of a command line") {
    const File file(
        "# what for\n\n--epochs 3  # short\n  --lr=0.25\n--no_dropout\n--betas 0.5,0.75\n");
    const Program program({"train", "--recipe", file.path});
    CHECK(program.options.epochs == 3);
    CHECK(program.options.optimizer.learning_rate == 0.25f);
    CHECK(!program.options.dropout);
    CHECK(program.options.optimizer.betas == std::array{0.5f, 0.75f});
    CHECK(program.options.recipe == file.path);
}

TEST_CASE("flags of the command line override a recipe's, before and after it") {
    const File file("--epochs 3\n--global-batch 96\n--lr 0.25\n");
    const Program program(
        {"train", "--epochs", "5", "--recipe=" + file.path, "--batch_size=7", "--lr=0.5"});
    CHECK(program.options.epochs == 5);
    CHECK(program.options.batch_size == 7);
    CHECK(!program.options.global_batch);
    CHECK(program.options.optimizer.learning_rate == 0.5f);
}

TEST_CASE("every recipe of gyre's own can be parsed, and stands in --help") {
    REQUIRE(!recipe_names().empty());
    for (const std::string& name : recipe_names()) {
        const Program program({"train", "--recipe", name});
        CHECK(program.options.optimizer.learning_rate.has_value());
        CHECK(program.app.get_subcommand("train")->help().find(name) != std::string::npos);
    }
}

TEST_CASE("a recipe that is none is refused, with its line") {
    const std::string first = "recipe ";
    const File flag("--epochs 3\n--epcohs 3\n"), word("epochs = 3\n"), nested("--recipe mnist99\n");
    CHECK(refusal({"train", "--recipe", flag.path})
              .starts_with(first + flag.path +
                           ", line 2: gyre train has no flag --epcohs; did you mean --epochs?"));
    CHECK(refusal({"train", "--recipe", word.path})
              .starts_with(first + word.path + ", line 1: 'epochs' is not a flag"));
    CHECK(refusal({"train", "--recipe", nested.path})
              .starts_with(first + nested.path + ", line 1: '--recipe' is not a flag"));
    CHECK(refusal({"train", "--recipe", "mnist9"}).ends_with("; did you mean mnist99?"));
    CHECK(
        refusal({"train", "--recipe", flag.dir.path().string()}).find("no file that can be read") !=
        std::string::npos);
}
