// Receipts of trainings, and gyre verify.
#include <fmt/format.h>

#include <cmath>
#include <fstream>
#include <sstream>

#include "tests/program/meeting.hpp"
#include "tests/program/small_training.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/expect_error.hpp"
#include "train/checkpoint.hpp"
#include "train/hash.hpp"
#include "train/receipt.hpp"

using namespace gyre;
using namespace gyre::model;
using namespace gyre::test;
using train::Checkpoint, train::Receipt;
using train::checkpoint_file, train::parse_receipt, train::read_checkpoint, train::receipt_file;

namespace {

constexpr const char* kFlags =
    "--epochs 3 --global-batch 10 --optimizer adam --shards 4 --save-every 4steps --keep 99 ";

std::string text_of(const std::filesystem::path& file) {
    std::ostringstream text;
    text << std::ifstream(file).rdbuf();
    return text.str();
}

Receipt receipt_of(const std::string& folder) {
    return parse_receipt(text_of(receipt_file(folder)), folder);
}

std::filesystem::path step_file(const std::string& folder, int step) {
    char name[64];
    std::snprintf(name, sizeof name, "step-%09d.safetensors", step);
    return std::filesystem::path(folder) / name;
}

}  // namespace

TEST_CASE(
    "a receipt has the hash of each checkpoint and each epoch's end, on any number of ranks") {
    const Training training;
    const std::string one = training.file("one"), three = training.file("three");
    training.run(1, kFlags + ("--save " + one));
    training.run(3, kFlags + ("--shard-optimizer on --save " + three));
    const Receipt receipt = receipt_of(one);
    std::vector<std::int64_t> steps;
    for (const auto& [step, hash] : receipt.hashes) {
        steps.push_back(step);
        train::SlicesHash state;
        for (const auto& tensor :
             read_safetensors(step_file(one, static_cast<int>(step))).tensors) {
            state.add(tensor.name, 0, tensor.values);
        }
        CHECK(state.text(*comm::make_single_communicator()) == hash);
    }
    CHECK(steps == std::vector<std::int64_t>{4, 6, 8, 12, 16, 18});  // 6 steps an epoch
    CHECK(receipt_of(three).hashes == receipt.hashes);
    CHECK(receipt.settings.at("virtual-ranks") == "4");
}

TEST_CASE("a receipt has rank 0's running statistics where each rank has its own") {
    const Training training;
    std::ofstream(training.model()) << "conv 6 k3 nobias\nbatchnorm local\nrelu\nlinear classes\n";
    const std::string one = training.file("one"), three = training.file("three");
    training.run(1, kFlags + ("--no-eval --save " + one));
    training.run(3, kFlags + ("--no-eval --save " + three));
    CHECK(receipt_of(one).hashes.size() == 6);
    CHECK(receipt_of(three).hashes == receipt_of(one).hashes);
}

TEST_CASE("gyre verify finds the same training again, on other ranks and from a checkpoint") {
    const Training training;
    const std::string run = training.file("run");
    training.run(1, kFlags + ("--save " + run));
    for (const int step : {0, 8}) {
        const std::string from = step == 0 ? "" : " --from " + step_file(run, step).string();
        for (const int ranks : {0, 2}) {
            const Outcome same = run_gyre(ranks, fmt::format("verify {}{}", run, from));
            INFO(same.output);
            CHECK(same.exit_code == 0);
            CHECK(count_of(same.output, fmt::format("{}: identical to step 18 ({} hashes)", run,
                                                    step == 0 ? 6 : 3)) == 1);
        }
    }
    const Outcome part =
        run_gyre(0, fmt::format("verify {} --from {} --to {}", run, step_file(run, 8).string(),
                                step_file(run, 12).string()));
    INFO(part.output);
    CHECK(part.exit_code == 0);
    CHECK(count_of(part.output, "identical to step 12 (1 hash)") == 1);
    const Outcome late = run_gyre(0, "verify " + run + " --from " + run + "/last.safetensors");
    INFO(late.output);
    CHECK(late.exit_code == 3);
    CHECK(count_of(late.output, "no hash after step 18") == 1);
}

TEST_CASE("--receipt-every adds hashes where no checkpoint is") {
    const Training training;
    const std::string run = training.file("run");
    training.run(1, "--epochs 2 --global-batch 10 --receipt-every 5 --save " + run);
    std::vector<std::int64_t> steps;
    for (const auto& [step, hash] : receipt_of(run).hashes) {
        steps.push_back(step);
    }
    CHECK(steps == std::vector<std::int64_t>{5, 6, 10, 12});
    CHECK(run_gyre(0, "verify " + run).exit_code == 0);
}

TEST_CASE("gyre verify and gyre replay run on ranks that are started by hand") {
    const Training training;
    const std::string run = training.file("run");
    training.run(1, kFlags + ("--save " + run));
    const auto [command, result] =
        GENERATE(std::pair("verify", "identical to step 18 (6 hashes)"),
                 std::pair("replay --step 9", "step 9: step 3 of epoch 2, 10 images"));
    Jobs jobs;
    for (const int rank : {0, 1}) {
        jobs.start(
            fmt::format("{} {} --data {} --comm gloo --init-method {} --rank {} --world-size 2 "
                        "--job-id j --insecure --init-timeout 60 --timeout 60 --threads 1 "
                        "--device cpu --flight-record {}",
                        command, run, training.data(), "file://" + training.file("meet"), rank,
                        training.file("record")));
    }
    const auto outcomes = jobs.wait();
    INFO(outcomes[0].output);
    CHECK(outcomes[0].exit_code == 0);
    CHECK(outcomes[1].exit_code == 0);
    CHECK(count_of(outcomes[0].output, result) == 1);
}

TEST_CASE("an evaluation that changes the learning rate counts with the epoch's end") {
    const Training training;
    const std::string run = training.file("run");
    training.run(1,
                 "--epochs 3 --global-batch 10 --lr-schedule plateau --lr-gamma 0.5 --shards 2 "
                 "--save-every 3steps --keep 99 --save " +
                     run);  // 6 steps an epoch
    CHECK(receipt_of(run).hashes.size() == 6);
    CHECK(count_of(text_of(receipt_file(run)), "\"step\":6,") == 1);
    const Outcome same = run_gyre(2, "verify " + run);
    INFO(same.output);
    CHECK(same.exit_code == 0);
}

TEST_CASE("a training that resumes has one receipt, without what it did again") {
    const Training training;
    const std::string whole = training.file("whole"), run = training.file("run");
    training.run(1, kFlags + ("--save " + whole));
    training.run(2, kFlags + ("--save " + run));
    training.run(3, kFlags + ("--save " + run + " --resume " + step_file(run, 8).string()));
    CHECK(receipt_of(run).hashes == receipt_of(whole).hashes);
    CHECK(count_of(text_of(receipt_file(run)), "\"step\":18,") == 1);
    CHECK(count_of(text_of(receipt_file(run)), "\"event\":\"start\"") == 2);
}

TEST_CASE("gyre verify finds one changed bit of one parameter at one step") {
    const Training training;
    const std::string run = training.file("run");
    training.run(1, kFlags + ("--save " + run));
    Checkpoint planted = read_checkpoint(step_file(run, 8));
    float& value = planted.weights.tensors.at(1).values.at(5);
    value = std::nextafter(value, 10.0f);
    planted.weights.metadata.erase("format");
    write_safetensors(step_file(run, 8), checkpoint_file(std::move(planted)));
    training.run(1, kFlags + ("--save " + run + " --resume " + step_file(run, 8).string()));

    const Outcome parted = run_gyre(2, "verify " + run);
    INFO(parted.output);
    CHECK(parted.exit_code == 6);
    CHECK(count_of(parted.output, "it parts after step 8 and at step 12 at the latest") == 1);
    CHECK(count_of(parted.output, "step-000000012.safetensors") == 1);
    CHECK(count_of(parted.output, " values differ, the first at [") == 1);
    const Outcome diff =
        run_gyre(0, "diff " + step_file(run, 8).string() + " " + step_file(run, 12).string());
    CHECK(diff.exit_code == 6);
    // From the changed checkpoint on it is what it says.
    CHECK(run_gyre(0, "verify " + run + " --from " + step_file(run, 8).string()).exit_code == 0);
}

TEST_CASE("gyre verify refuses another training before the first step") {
    const Training training;
    const std::string run = training.file("run");
    training.run(2, "--epochs 1 --save " + run);
    const Outcome ranks = run_gyre(3, "verify " + run);
    INFO(ranks.output);
    CHECK(ranks.exit_code == 2);
    CHECK(count_of(ranks.output, "--virtual-ranks 2: each of the 3 ranks must have one") == 1);
    make_dataset(training.dir.path() / "other", 53, 37, 1, 6, 6, 3);
    const Outcome data =
        run_gyre(2, "verify " + run + " --data " + (training.dir.path() / "other").string());
    INFO(data.output);
    CHECK(data.exit_code == 3);
    CHECK(count_of(data.output, "the data set: ") == 1);
    std::filesystem::create_directory(training.file("bad"));
    std::ofstream(receipt_file(training.file("bad"))) << "[]\n";
    const Outcome bad = run_gyre(3, "verify " + training.file("bad"));
    INFO(bad.output);
    CHECK(bad.exit_code == 3);
    CHECK(count_of(bad.output, "line 1: that is not a line of a receipt") == 1);
    const Outcome none = run_gyre(0, "verify " + training.file("none"));
    INFO(none.output);
    CHECK(none.exit_code == 3);
    CHECK(count_of(none.output, "no receipt can be read there") == 1);
}

TEST_CASE("lines that are not a receipt's are named") {
    const std::string start =
        R"({"event":"start","receipt":2,"version":"x","settings":{},"identity":{"schema":2,"flags":{},"facts":{}}})"
        "\n";
    const std::string state = R"({"event":"state","step":4,"hash":"ab"})"
                              "\n";
    CHECK(parse_receipt(start + state, "r").hashes.at(4) == "ab");
    CHECK(parse_receipt(start + state + state.substr(0, 9), "r").hashes.size() == 1);  // cut off
    const auto refuse = [](const std::string& text, const std::string& part) {
        INFO(text);
        expect_error(ExitCode::bad_input, {"r", part}, [&] { parse_receipt(text, "r"); });
    };
    refuse("", "no line");
    refuse(state, "line 1");
    refuse(start + "[]\n", "line 2");
    refuse(start + "{\"event\":\"state\",\"step\":1e300,\"hash\":\"\"}\n", "line 2");
    refuse(start + "{\"event\":\"state\",\"step\":1,\"hash\":2}\n", "line 2");
    refuse("{\"event\":\"start\",\"receipt\":9}\n", "format 9");
}
