// Checkpoints: a training resumes from each of them to the last bit, and from nothing else.
#include <filesystem>
#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>
#include <set>

#include "base/error.hpp"
#include "tests/program/small_training.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/expect_error.hpp"
#include "tests/support/temp_dir.hpp"
#include "train/checkpoint.hpp"
#include "train/hash.hpp"

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
            // The best epoch so far came before it.
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

TEST_CASE("a training in fp16 goes on from after a skipped step, and ends with the same bytes") {
    const Training training;
    const fs::path whole = training.file("whole"), part = training.file("part");
    const std::string flags =
        "--epochs 1 --global-batch 10 --precision fp16 --optimizer adam --lr 0.01 "
        "--bucket-kib 1000 --save-every 4steps --keep 9 --save ";
    const auto skipped = [&] {
        std::vector<bool> all;
        for (const auto& step : read_events(training.file("log.jsonl"), "step")) {
            all.push_back(step.at("skipped"));
        }
        return all;
    };
    const auto spoil = [](const ThreadRanks::Sum& sum) {
        if (sum.number == 1) {
            static_cast<float*>(sum.data)[3] = std::numeric_limits<float>::infinity();
        }
    };
    training.run(2, flags + whole.string(), {}, spoil);
    CHECK(skipped() == std::vector{false, true, false, false, false, false});
    training.run(
        2, flags + part.string() + " --resume " + (whole / "step-000000004.safetensors").string());
    CHECK(skipped() == std::vector{false, false});
    CHECK(file_bytes(part / "last.safetensors") == file_bytes(whole / "last.safetensors"));
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
        CHECK(all.erase("receipt") == 1);
        return all;
    };
    using Names = std::set<std::string>;
    CHECK(names("").empty());
    CHECK(names("--keep 2") == Names{"step-000000018", "step-000000024"});
    CHECK(names("--keep 9 --save-every 3") == Names{"step-000000018", "step-000000024"});
    CHECK(names("--keep 9 --save-every 9steps") == Names{"step-000000006", "step-000000009",
                                                         "step-000000012", "step-000000018",
                                                         "step-000000024"});
    // Steps of a graph are submitted together: one that is due within it is saved after it. The
    // first steps are submitted one by one.
    CHECK(names("--keep 9 --save-every 3steps --device emulated --graph on --graph-steps 4") ==
          Names{"step-000000003", "step-000000006", "step-000000010", "step-000000012",
                "step-000000016", "step-000000018", "step-000000022", "step-000000024"});
}

TEST_CASE("last gets its name after all others, so that a resumed training finds those") {
    const Training training;
    const fs::path folder = training.file("run"), from = training.file("from");
    training.run(1, "--epochs 1 --save " + from.string());
    fs::create_directories(folder / "best.safetensors.gyre.link" / "in the way");
    CheckpointWriter writer(folder, 1);
    writer.write(read_checkpoint(from), 1, true, true);
    expect_error(ExitCode::bad_input, {"could not be written"}, [&] { writer.finish(); });
    CHECK(fs::exists(folder / "step-000000001.safetensors"));
    CHECK(!fs::exists(last_checkpoint(folder)));
}

TEST_CASE("--keep counts the checkpoints of earlier runs of the training, and no other files") {
    const Training training;  // of 6 steps an epoch
    const fs::path folder = training.file("run");
    const auto names = [&](const std::string& flags) {
        training.run(1, "--global-batch 10 --no-eval --save " + folder.string() + " " + flags);
        std::set<std::string> all;
        for (const fs::directory_entry& file : fs::directory_iterator(folder)) {
            all.insert(file.path().filename().string());
        }
        CHECK(all.erase("last.safetensors") == 1);
        CHECK(all.erase("best.safetensors") == 1);
        CHECK(all.erase("receipt.jsonl") == 1);
        return all;
    };
    using Names = std::set<std::string>;
    const std::string resume = "--resume " + folder.string() + " ";
    const std::string sixth = "step-000000006.safetensors", twelfth = "step-000000012.safetensors",
                      eighteenth = "step-000000018.safetensors";
    CHECK(names("--keep 2 --epochs 1") == Names{sixth});
    CHECK(names("--keep 2 --epochs 2 " + resume) == Names{sixth, twelfth});
    put(folder / "step-1.txt", "");
    put(folder / "step-.safetensors", "");
    CHECK(names("--epochs 3 " + resume) ==
          Names{sixth, twelfth, "step-1.txt", "step-.safetensors"});
    CHECK(names("--keep 2 --epochs 4 " + resume) ==
          Names{twelfth, "step-000000024.safetensors", "step-1.txt", "step-.safetensors"});
    // From an earlier one: the latest are those that were written last.
    CHECK(names("--keep 2 --epochs 3 --resume " + (folder / twelfth).string()) ==
          Names{eighteenth, "step-000000024.safetensors", "step-1.txt", "step-.safetensors"});
    // A step that is saved twice counts once: after six steps, and at the epoch's end.
    fs::remove_all(folder);
    CHECK(names("--keep 2 --epochs 3 --save-every 6steps") == Names{twelfth, eighteenth});
}

TEST_CASE("--save refuses a folder with another training's checkpoints, with --resume, too") {
    const Training training;
    const fs::path a = training.file("a"), b = training.file("b");
    const std::string flags = "--epochs 1 --global-batch 10 --keep 1 ";
    training.run(1, flags + "--save " + a.string());
    training.run(1, flags + "--seed 2 --save " + b.string());
    const auto refuse = [&](const std::string& more, const std::string& file) {
        INFO(more << ", " << file);
        expect_error(
            ExitCode::bad_input, {"`save` " + b.string() + ": " + file + " is there"}, [&] {
                training.run(1, "--epochs 2 --global-batch 10 --save " + b.string() + " " + more);
            });
    };
    const std::string resume = "--resume " + a.string(),
                      file = "--resume " + (a / "last.safetensors").string();
    for (const char* name : {"last", "best", "step-000000006"}) {
        const fs::path there = b / (std::string(name) + ".safetensors");
        const std::string before = file_bytes(there);
        for (const std::string& more : {std::string(), resume, file}) {
            refuse(more, there.filename().string());
        }
        CHECK(file_bytes(there) == before);
        fs::remove(there);
    }
    const std::string more = "--epochs 2 --global-batch 10 --save ";
    training.run(1, more + b.string() + " " + resume);  // nothing is lost there any more
    training.run(1, more + b.string() + " --overwrite " + file);
    training.run(1, more + a.string() + "/. " + file);
    CHECK(file_bytes(a / "last.safetensors") == file_bytes(b / "last.safetensors"));
}

TEST_CASE("--resume auto resumes what the folder of --save has, or begins") {
    const Training training;
    const std::string run = training.file("run"), whole = training.file("whole");
    const auto train = [&](int epochs, const std::string& flags) {
        return training.run(2, "--global-batch 10 --epochs " + std::to_string(epochs) + flags,
                            [](int rank) { return rank == 1 ? "--resume auto" : ""; });
    };
    train(3, " --save " + whole);
    CHECK(train(1, " --resume auto --save " + run).losses.size() == 6);
    const auto resumed = train(3, " --resume auto --save " + run);
    CHECK(resumed.start.at("resumed").at("epoch") == 2);
    CHECK(resumed.losses.size() == 12);
    CHECK(file_bytes(run + "/last.safetensors") == file_bytes(whole + "/last.safetensors"));
    expect_error(ExitCode::usage, {"`resume` auto", "`save`"}, [&] { train(1, " --resume auto"); });
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
    refuse(2, "--lr 0.5", "`lr`: not given in the saved training, '0.5' now");
    refuse(2, "--optimizer adam", "`optimizer`: 'sgd' in the saved training, 'adam' now");
    refuse(2, "--seed 9", "`seed`");
    refuse(2, "--model " + noisy_model(training), "the model: '");
    refuse(2, "--data " + other_data.data() + " --limit 20", "the data set: '");
    refuse(1, "--device emulated", "the device: 'CPU' in the saved training, 'emulated GPU' now");
    expect_error(ExitCode::usage, {"`virtual-ranks` 2", "3 ranks"},
                 [&] { training.run(3, flags + " --resume " + run.string()); });
    refuse(2, "--virtual-ranks 0", "`virtual-ranks`: '2' in the saved training, '0' now");
    // The values that the flags come to.
    expect_error(ExitCode::bad_input, {"the global batch: '10' in the saved training, '12' now"},
                 [&] { training.run(2, "--global-batch 12 --resume " + run.string()); });
    const fs::path cosine = training.file("cosine");
    const std::string schedule = "--global-batch 10 --lr-schedule cosine ";
    training.run(1, schedule + "--epochs 2 --save " + cosine.string());
    expect_error(ExitCode::bad_input,
                 {"the steps of the schedule: '12' in the saved training, '18' now"},
                 [&] { training.run(1, schedule + "--epochs 3 --resume " + cosine.string()); });
    // Only with three terms and more has a sum several orders.
    for (const int ranks : {2, 3}) {
        const fs::path other = training.file("other");
        training.run(ranks, "--virtual-ranks 0 --epochs 1 --global-batch 10 --overwrite --save " +
                                other.string());
        Checkpoint library = read_checkpoint(other);
        CHECK(library.identity.facts.at("communicator") == "threads");
        library.identity.facts["communicator"] = "MPI";
        write_safetensors(other / "last.safetensors", checkpoint_file(std::move(library)));
        const auto resume = [&] { training.run(ranks, flags + "--resume " + other.string()); };
        if (ranks == 2) {
            resume();
        } else {
            expect_error(ExitCode::bad_input,
                         {"the communicator (`comm`): 'MPI' in the saved training, 'threads' now"},
                         resume);
            expect_error(ExitCode::bad_input,
                         {"the number of ranks: '3' in the saved training, '1' now"},
                         [&] { training.run(1, flags + "--resume " + other.string()); });
        }
    }
    // Without its hash no damage would be found.
    TensorFile unhashed = read_safetensors(last);
    unhashed.metadata.erase("gyre.hash");
    write_safetensors(last, unhashed);
    refuse(2, "", "the hash of its content is missing");
    put(last, good + std::string(1 << 20, '\0'));
    refuse(2, "", "something was added");
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

TEST_CASE("a training goes on with its model at another path, and from an earlier version's file") {
    const Training training;
    const fs::path run = training.file("run"), model = training.file("moved");
    training.run(1, "--epochs 1 --lr 0.10 --save " + run.string());
    fs::copy_file(training.model(), model);
    const auto resume = [&] {
        return training
            .run(1, "--epochs 2 --lr 1e-1 --model " + model.string() + " --resume " + run.string())
            .epochs.size();
    };
    CHECK(resume() == 1);
    // Schema 1: the texts of the flags that were given, and facts by their descriptions.
    const Checkpoint now = read_checkpoint(run);
    nlohmann::json texts = {{"--lr", "0.10"}, {"--model", training.model()}};
    for (const auto& [key, fact] : now.identity.facts) {
        texts[kFacts.at(key)] = fact;
    }
    TensorFile old = read_safetensors(run / "last.safetensors");
    const auto save_old = [&] {
        old.metadata["gyre.settings"] = texts.dump();
        old.metadata["gyre.hash"] = hash_tensors(old, {"gyre.hash", "format"});
        write_safetensors(run / "last.safetensors", old);
    };
    CHECK(std::erase_if(old.tensors, [](const HostTensor& tensor) {
              return tensor.name == "optimizer.step_rest";
          }) == 1);
    save_old();
    CHECK(read_checkpoint(run).identity.settings.at("lr") == "0.1");
    CHECK(read_checkpoint(run).identity.facts == now.identity.facts);
    CHECK(resume() == 1);
    texts["--lr"] = "0.2";
    texts["--no-dropout"] = "true";
    save_old();
    expect_error(ExitCode::bad_input,
                 {"`lr`: '0.2' in the saved training, '0.1' now",
                  "`no-dropout`: 'true' in the saved training, 'false' now"},
                 resume);
    // Earlier versions called virtual ranks shards, and wrote nothing if there were none.
    CHECK(virtual_ranks(read_checkpoint(run).identity) == 0);
    texts["--shards"] = "4";
    save_old();
    CHECK(read_checkpoint(run).identity.settings.at("virtual-ranks") == "4");
    CHECK(!read_checkpoint(run).identity.settings.contains("shards"));
    old.metadata["gyre.settings"] = R"({"schema": 2, "flags": {"shards": "8"}, "facts": {}})";
    old.metadata["gyre.hash"] = hash_tensors(old, {"gyre.hash", "format"});
    write_safetensors(run / "last.safetensors", old);
    CHECK(read_checkpoint(run).identity.settings.at("virtual-ranks") == "8");
    CHECK(!read_checkpoint(run).identity.settings.contains("shards"));
    // A later version's.
    old.metadata["gyre.settings"] = R"({"schema": 3})";
    old.metadata["gyre.hash"] = hash_tensors(old, {"gyre.hash", "format"});
    write_safetensors(run / "last.safetensors", old);
    expect_error(ExitCode::bad_input, {"schema 3"}, resume);
}

TEST_CASE("weights alone are read from a checkpoint, as they are from any file") {
    const Training training;
    const fs::path run = training.file("run");
    training.run(1, "--epochs 1 --optimizer adam --save " + run.string());
    const TensorFile all = read_safetensors(run / "last.safetensors");
    const TensorFile weights = read_weights(run / "last.safetensors");
    CHECK(all.tensors.size() == 3 * weights.tensors.size() + 2);  // two moments, and the step
    for (const HostTensor& tensor : weights.tensors) {
        CHECK(!tensor.name.starts_with("optimizer."));
    }
}

TEST_CASE("a checkpoint whose position cannot be is refused") {
    const Training training;
    const fs::path run = training.file("run");
    training.run(1, "--epochs 2 --save " + run.string());
    CHECK(read_checkpoint(run).cursor.epoch == 3);
    TensorFile file = read_safetensors(run / "last.safetensors");
    auto cursor = nlohmann::json::parse(file.metadata.at("gyre.cursor"));
    const auto save = [&] {
        file.metadata["gyre.cursor"] = cursor.dump();
        file.metadata["gyre.hash"] = hash_tensors(file, {"gyre.hash", "format"});
        write_safetensors(run / "last.safetensors", file);
    };
    const auto good = cursor;
    for (const auto& [key, value] :
         {std::pair{"epoch", 1e300}, std::pair{"step", 0.5}, std::pair{"images", -1e20}}) {
        cursor = good;
        cursor[key] = value;
        save();
        expect_error(ExitCode::bad_input, {"last.safetensors", "instead of an integer"},
                     [&] { read_checkpoint(run); });
    }
    cursor = good;
    for (const int epoch : {-1, 3, 1'000'000'000}) {
        cursor["best_epoch"] = epoch;
        save();
        expect_error(ExitCode::bad_input, {"last.safetensors", "a best epoch that is not finished"},
                     [&] { read_checkpoint(run); });
    }
    cursor.erase("best_epoch");  // as before 0.10
    save();
    CHECK(read_checkpoint(run).cursor.best_epoch == 2);
}
