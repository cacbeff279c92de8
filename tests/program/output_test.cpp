// The files a training writes: where they may be, what they hold, and what is left behind.
#include <sys/stat.h>
#include <sys/sysmacros.h>

#include <filesystem>
#include <fstream>

#include "model/safetensors.hpp"
#include "tests/program/gyre_process.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/temp_dir.hpp"
#include "train/hash.hpp"

using namespace gyre::test;
namespace fs = std::filesystem;

namespace {

struct Set {
    TempDir dir;
    std::string data = file("set"), base = "train --threads 1 --data " + data + " ";
    Set() { make_dataset(data, 320, 100, 1, 28, 28, 4); }
    std::string file(const std::string& name) const { return (dir.path() / name).string(); }
};

double loss_of(const std::string& output) {
    const auto at = output.find("test loss ");
    REQUIRE(at != std::string::npos);
    return std::stod(output.substr(at + 10));
}

}  // namespace

TEST_CASE("a training in 16 bits says so, scales its loss in fp16, and is evaluated likewise") {
    const Set set;
    const std::string run = set.file("run"), json = set.file("log");
    const std::string weights = run + "/last.safetensors";
    for (const std::string precision : {"fp32", "bf16", "fp16"}) {
        const Outcome trained =
            run_gyre(2, set.base + "--epochs 2 --lr 0.1 --log-interval 1 --precision " + precision +
                            " --metrics " + json + " --save " + run);
        INFO(trained.output);
        REQUIRE(trained.exit_code == 0);
        CHECK((trained.output.find("· " + precision) != std::string::npos) ==
              (precision != "fp32"));
        CHECK(read_events(json, "start").at(0).at("precision") == precision);
        for (const auto& step : read_events(json, "step")) {
            CHECK(step.contains("loss_scale") == (precision == "fp16"));
            if (precision == "fp16") {
                CHECK(step.at("loss_scale") == 65536.0);
                CHECK(step.at("skipped") == false);
            }
        }
        const double said = read_events(json, "epoch").back().at("test_loss").get<double>();
        const auto evaluated = [&](const std::string& flags) {
            return loss_of(
                run_gyre(0, "eval --data " + set.data + " --weights " + weights + flags).output);
        };
        // The same arithmetic on one rank, image for image; or another one.
        const double same = evaluated(" --precision " + precision);
        CHECK(same == Approx(said).epsilon(1e-5));
        CHECK((evaluated("") == same) == (precision == "fp32"));
        fs::remove_all(run);
    }
}

TEST_CASE("training accuracy is reported; the last weights are kept beside the best") {
    const Set set;
    const std::string run = set.file("run"), json = set.file("log");
    const std::string last = run + "/last.safetensors", best = run + "/best.safetensors";
    const auto train = [&](const std::string& flags) {
        const Outcome outcome = run_gyre(2, set.base + "--metrics " + json + " " + flags);
        INFO(outcome.output);
        REQUIRE(outcome.exit_code == 0);
        return outcome.output;
    };
    const auto evaluate = [&](const std::string& weights) {
        return loss_of(run_gyre(0, "eval --data " + set.data + " --weights " + weights).output);
    };
    // A rate that overshoots: the best epoch is not the last.
    train("--epochs 6 --lr 0.3 --save " + run);
    auto epochs = read_events(json, "epoch");
    std::size_t top = 0;
    for (std::size_t i = 0; i < epochs.size(); ++i) {
        top = epochs[i].at("test_accuracy") > epochs[top].at("test_accuracy") ? i : top;
    }
    CHECK(evaluate(best) == Approx(epochs[top].at("test_loss").get<double>()).epsilon(1e-5));
    CHECK(evaluate(last) == Approx(epochs.back().at("test_loss").get<double>()).epsilon(1e-5));
    CHECK(fs::exists(best));
    // Without dropout and movement, the training set's accuracy is what evaluating it gives.
    for (const char* name : {"images-idx4", "labels-idx1"}) {
        fs::copy_file(set.file("set/train-" + std::string(name) + "-ubyte"),
                      set.file("set/test-" + std::string(name) + "-ubyte"),
                      fs::copy_options::overwrite_existing);
    }
    const std::string output =
        train("--epochs 1 --lr 0 --no-dropout --init " + best + " --save " + set.file("other"));
    const auto epoch = read_events(json, "epoch").at(0);
    CHECK(epoch.at("train_accuracy").get<double>() ==
          Approx(epoch.at("test_accuracy").get<double>()));
    CHECK(epoch.at("train_accuracy").get<double>() > 0.3);
    CHECK(count_of(output, "train accuracy ") == 1);
}

TEST_CASE("Ctrl-C keeps the latest weights") {
    const Set set;
    const std::string run = set.file("run"), json = set.file("log");
    // In the foreground: otherwise `timeout` passes the signal on twice, and a second Ctrl-C ends
    // gyre at once.
    const Outcome outcome = run_shell(
        "timeout --foreground 60 " +
        gyre_command(0,
                     set.base + "--no-eval --epochs 100000 --metrics " + json + " --save " + run) +
        " & pid=$!; for i in $(seq 600); do grep -qs '\"epoch\":2' " + json +
        " && break; sleep 0.05; done; kill -INT $pid; sent=$(date +%s); wait $pid; code=$?; "
        "[ $(($(date +%s) - sent)) -le 10 ] || code=124; exit $code");
    INFO(outcome.output);
    CHECK(outcome.exit_code == 130);  // 124: it took longer than 10 s to save and end
    CHECK(count_of(outcome.output, "--resume " + run + " resumes from here") == 1);
    CHECK(!gyre::model::read_safetensors(run + "/last.safetensors").tensors.empty());
}

TEST_CASE("--save and --metrics leave alone what is no file") {
    const Set set;
    const auto refuse = [&](const std::string& flags, int code, const std::string& part) {
        const Outcome outcome = run_gyre(0, set.base + "--epochs 1 " + flags);
        INFO(flags << "\n" << outcome.output);
        CHECK(outcome.exit_code == code);
        CHECK(count_of(outcome.output, part) == 1);
        CHECK(count_of(outcome.output, "epoch 1/1") == 0);
    };
    // Like /dev/null, but nobody else's.
    const std::string node = set.file("node");
    const bool has_node = mknod(node.c_str(), S_IFCHR | 0666, makedev(1, 3)) == 0;
    for (const std::string& device : {has_node ? node : std::string("/dev/null")}) {
        for (const char* flag : {"--save", "--metrics"}) {
            if (has_node || std::string(flag) == "--metrics") {
                refuse(std::string(flag) + " " + device, 3, std::string(flag) + " " + device);
            }
        }
        CHECK(fs::is_character_file(device));
    }
    const std::string pipe = set.file("pipe");
    REQUIRE(mkfifo(pipe.c_str(), 0600) == 0);
    refuse("--save " + pipe, 3, "that is not a folder");
    refuse("--save " + set.file("set/train-labels-idx1-ubyte"), 3, "that is not a folder");
    refuse("--keep 2", 2, "give that, too");
    refuse("--save-every 2", 2, "give that, too");
    refuse("--save " + set.file("run") + " --save-every 2hours", 2, "500steps");
    refuse("--metrics " + set.dir.path().string(), 3, "not a file, pipe or terminal");
    for (const char* flag : {"--save", "--resume", "--metrics", "--init", "--model",
                             "--flight-record", "--kernels-cache"}) {
        refuse(std::string(flag) + " ''", 2, "the path is empty");
    }
    CHECK(count_of(run_gyre(0, "train --data ''").output, "--data: the path is empty") == 1);
    // A pipe takes JSON lines.
    const Outcome piped =
        run_shell("cat " + pipe + " & " +
                  gyre_command(0, set.base + "-q --epochs 1 --metrics " + pipe) + "; wait");
    CHECK(piped.exit_code == 0);
    CHECK(count_of(piped.output, "\"event\":\"end\"") == 1);
}

TEST_CASE("what a killed job left while it saved is gone with the next save") {
    const Set set;
    const fs::path folder = set.dir.path() / "weights", last = folder / "last.safetensors";
    const std::string save =
        set.base + "--no-eval --epochs 1 --overwrite --save " + folder.string();
    const auto files = [&] {
        return std::distance(fs::directory_iterator(folder), fs::directory_iterator());
    };
    // The limit on the size of files kills it as it writes.
    run_shell("ulimit -c 0; ulimit -f 8; " + gyre_command(0, save));
    CHECK(files() == 2);  // the receipt, and a part of last
    CHECK(!fs::exists(last));
    const Outcome outcome = run_gyre(0, save);
    INFO(outcome.output);
    CHECK(outcome.exit_code == 0);
    CHECK(files() == 3);  // the receipt, last and best
    CHECK(!gyre::model::read_safetensors(last).tensors.empty());
    // Two jobs that save to one place at once leave files that are whole.
    const Outcome both =
        run_shell(gyre_command(0, save) + " & " + gyre_command(0, save) + "; wait");
    INFO(both.output);
    CHECK(files() == 3);
    CHECK(!gyre::model::read_safetensors(last).tensors.empty());
    // One that was ended between two names of a file does not spoil the first.
    fs::rename(last, last.string() + ".gyre.tmp");
    const auto best =
        gyre::train::hash_tensors(gyre::model::read_safetensors(folder / "best.safetensors"));
    run_shell("ulimit -c 0; ulimit -f 8; " + gyre_command(0, save));
    CHECK(best ==
          gyre::train::hash_tensors(gyre::model::read_safetensors(folder / "best.safetensors")));
}
