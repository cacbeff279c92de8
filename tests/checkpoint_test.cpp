// Checkpoints: a training goes on from each of them to the last bit, and from nothing else.
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <set>

#include "kernels/base/error.hpp"
#include "tests/catch.hpp"
#include "tests/expect_error.hpp"
#include "tests/small_training.hpp"
#include "tests/temp_dir.hpp"
#include "train/checkpoint.hpp"

using namespace gyre;
using namespace gyre::train;
using namespace gyre::test;
namespace fs = std::filesystem;

namespace {

void put(const fs::path& path, const std::string& bytes) {
    std::ofstream(path, std::ios::binary) << bytes;
}

// With dropout and running statistics.
std::string noisy_model(const Training& training) {
    const std::string path = training.file("noisy");
    std::ofstream(path) << "conv 4 k3\nbatchnorm\nrelu\ndropout 0.3\nlinear 12\nrelu\n"
                           "linear classes\n";
    return path;
}

}  // namespace

TEST_CASE("a training goes on from any of its checkpoints, and ends with the same bytes") {
    const Training training;
    const std::string common =
        "--epochs 3 --global-batch 10 --model " + noisy_model(training) + " ";
    for (const auto& [ranks, more] : std::vector<std::pair<int, std::string>>{
             {1, "--optimizer adam --lr-schedule cosine"},
             {2, "--lr 0.05 --momentum 0.9 --nesterov --warmup-steps 5"},
             {3, "--optimizer adamw --lr-schedule step --lr-step-size 1"},
             {2, "--optimizer adam --shard-optimizer on --bucket-kib 1"},
             {2, "--precision fp16 --optimizer adam --accumulate 2"},
             {1, "--no-shuffle --no-eval --max-grad-norm 0.5"},
             {1, "--device emulated --optimizer adam --graph on --graph-steps 2"}}) {
        INFO(ranks << " ranks, " << more);
        const std::string flags = common + more;
        const fs::path whole = training.file("whole"), part = training.file("part");
        fs::remove_all(whole);
        const auto uninterrupted =
            training.run(ranks, flags + " --keep 99 --save-every 4steps --save " + whole.string());
        const std::size_t steps = uninterrupted.losses.size();
        int resumed = 0;
        for (const fs::directory_entry& file : fs::directory_iterator(whole)) {
            const std::string name = file.path().filename().string();
            if (!name.starts_with("step-")) {
                continue;
            }
            INFO(name);
            const auto step = static_cast<std::size_t>(std::stoi(name.substr(5)));
            REQUIRE(step <= steps);
            fs::remove_all(part);
            fs::create_directory(part);
            // What is the best so far came before it.
            fs::copy_file(file.path(), part / "last.safetensors");
            const auto rest = training.run(
                ranks, flags + " --save " + part.string() + " --resume " + part.string());
            CHECK(rest.losses == std::vector(uninterrupted.losses.begin() + std::ptrdiff_t(step),
                                             uninterrupted.losses.end()));
            CHECK(file_bytes(part / "last.safetensors") == file_bytes(whole / "last.safetensors"));
            CHECK(rest.end.value("best_test_accuracy", -1.0) ==
                  uninterrupted.end.value("best_test_accuracy", -1.0));
            if (!rest.epochs.empty()) {
                for (const char* key : {"train_loss", "train_accuracy"}) {
                    CHECK(rest.epochs.front().at(key) ==
                          uninterrupted.epochs.at(3 - rest.epochs.size()).at(key));
                }
            }
            ++resumed;
        }
        CHECK(resumed >= 4);
    }
}

TEST_CASE("a longer training goes on from a shorter one's end") {
    const Training training;
    const fs::path both = training.file("both"), once = training.file("once");
    const std::string flags = "--optimizer adam --global-batch 10 --save ";
    training.run(2, flags + both.string() + " --epochs 1");
    training.run(2, flags + both.string() + " --epochs 3 --resume " + both.string());
    training.run(2, flags + once.string() + " --epochs 3");
    CHECK(file_bytes(both / "last.safetensors") == file_bytes(once / "last.safetensors"));
    CHECK(file_bytes(both / "best.safetensors") == file_bytes(once / "best.safetensors"));
}

TEST_CASE("--keep and --save-every say which checkpoints there are") {
    const Training training;  // of 6 steps an epoch
    const auto names = [&](const std::string& flags) {
        const fs::path folder = training.file("run");
        fs::remove_all(folder);
        training.run(
            1, "--epochs 4 --global-batch 10 --no-eval --save " + folder.string() + " " + flags);
        std::set<std::string> all;
        for (const fs::directory_entry& file : fs::directory_iterator(folder)) {
            all.insert(file.path().stem().string());
        }
        CHECK(all.erase("last") == 1);
        CHECK(all.erase("best") == 1);
        return all;
    };
    using Names = std::set<std::string>;
    CHECK(names("").empty());
    CHECK(names("--keep 2") == Names{"step-000000018", "step-000000024"});
    CHECK(names("--keep 9 --save-every 3") == Names{"step-000000018", "step-000000024"});
    CHECK(names("--keep 9 --save-every 9steps") == Names{"step-000000006", "step-000000009",
                                                         "step-000000012", "step-000000018",
                                                         "step-000000024"});
}

TEST_CASE("what is not this training's checkpoint is refused, and says what differs") {
    const Training training, other_data;
    const fs::path run = training.file("run"), last = run / "last.safetensors";
    const std::string flags = "--epochs 2 --global-batch 10 ";
    training.run(2, flags + "--save " + run.string());
    const std::string good = file_bytes(last);
    const auto refuse = [&](int ranks, const std::string& more, const std::string& part) {
        INFO(more);
        expect_error(ExitCode::bad_input, {part},
                     [&] { training.run(ranks, flags + more + " --resume " + run.string()); });
    };
    refuse(2, "--lr 0.5", "--lr: not given in the saved training, '0.5' now");
    refuse(2, "--optimizer adam", "--optimizer: not given in the saved training, 'adam' now");
    refuse(2, "--seed 9", "--seed");
    refuse(2, "--model " + noisy_model(training), "the model: '");
    refuse(2, "--data " + other_data.data() + " --limit 20", "the data set: '");
    refuse(1, "--device emulated", "the device: 'CPU' in the saved training, 'emulated GPU' now");
    refuse(3, "", "the number of ranks: '2' in the saved training, '3' now");
    // One bit of a weight, of the optimiser's state or of the metadata.
    for (const std::size_t at : {good.size() - 3, good.size() / 2, good.find("loss_sum") + 12}) {
        std::string bad = good;
        bad[at] = static_cast<char>(bad[at] ^ 1);
        put(last, bad);
        refuse(2, "", "the file is damaged");
    }
    put(last, good.substr(0, good.size() / 2));
    refuse(2, "", "last.safetensors");
    fs::remove(last);
    refuse(2, "", "the folder has no last.safetensors");
    // Weights alone.
    put(last, good);
    TensorFile weights = read_weights(last);
    weights.metadata = {};
    write_safetensors(last, weights);
    refuse(2, "", "begin a new training from them with `init`");
}

TEST_CASE("weights alone are read from a checkpoint, as they are from any file") {
    const Training training;
    const fs::path run = training.file("run");
    training.run(1, "--epochs 1 --optimizer adam --save " + run.string());
    const TensorFile all = read_safetensors(run / "last.safetensors");
    const TensorFile weights = read_weights(run / "last.safetensors");
    CHECK(all.tensors.size() == 3 * weights.tensors.size() + 1);  // two moments, and `step`
    for (const HostTensor& tensor : weights.tensors) {
        CHECK(!tensor.name.starts_with("optimizer."));
    }
}
