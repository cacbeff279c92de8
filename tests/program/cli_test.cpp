// The program as a user meets it: what it prints, writes and refuses, and with which exit code.
#include <cmath>
#include <filesystem>
#include <fstream>
#include <map>
#include <sstream>

#include "kernels/make_backend.hpp"
#include "model/safetensors.hpp"
#include "tests/program/gyre_process.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/temp_dir.hpp"
#include "train/checkpoint.hpp"

using namespace gyre::test;

namespace {

void check_contains(const std::string& text, std::initializer_list<std::string> parts) {
    for (const std::string& part : parts) {
        INFO(text);
        INFO("expected to contain: " << part);
        CHECK(text.find(part) != std::string::npos);
    }
}

void expect_exit(const Outcome& outcome, int code, std::initializer_list<std::string> parts) {
    INFO(outcome.output);
    CHECK(outcome.exit_code == code);
    check_contains(outcome.output, parts);
}

struct Set {
    TempDir dir;
    std::string data, base;
    Set(int train, int test, int channels, int height, int width, int classes) {
        data = (dir.path() / "set").string();
        make_dataset(data, train, test, channels, height, width, classes);
        base = "train --threads 1 --data " + data + " ";
    }
    std::string file(const std::string& name) const { return (dir.path() / name).string(); }
};

}  // namespace

TEST_CASE("info says what is there") {
    expect_exit(run_gyre(0, "info"), 0, {"compiler", "CUDA", "MPI", "built-in net"});
    const Outcome version = run_gyre(0, "--version");
    expect_exit(version, 0, {"gyre ", "(commit ", "compiler", "vectors", "CUDA", "MPI", "Gloo"});
    CHECK(run_gyre(0, "info").output.starts_with(version.output));
    expect_exit(run_gyre(0, "train --help"), 0, {"--bucket-kib", "--global-batch"});
}

TEST_CASE("unusual data sets train: classes, shapes, channels and sizes from the data") {
    const auto trains = [](const Set& set, int ranks, const std::string& flags) {
        expect_exit(run_gyre(ranks, set.base + flags), 0, {"test accuracy", "total"});
    };
    trains({300, 50, 1, 28, 28, 5}, 0, "--epochs 1");
    trains({300, 80, 1, 24, 40, 63}, 2, "--epochs 1");
    trains({900, 90, 3, 20, 33, 10}, 2, "--epochs 1");
    trains({10, 4, 1, 28, 28, 3}, 3, "--epochs 2");       // fewer images than ranks x batch
    trains({7, 1, 1, 28, 28, 2}, 4, "--global-batch 2");  // ranks without images in every step
    trains({2, 2, 1, 28, 28, 2}, 3, "--epochs 1");
}

TEST_CASE("a net takes time and memory by its size, and says where there is too little") {
    const Set set(8, 8, 1, 28, 28, 3);
    const auto train = [&](const std::string& limit, const std::string& layer) {
        std::ofstream(set.file("model")) << layer << "\navgpool global\nlinear classes\n";
        return run_shell(limit + gyre_command(0, set.base + "--epochs 1 --batch-size 8 --model " +
                                                     set.file("model")));
    };
    // Not by the stride.
    expect_exit(train("timeout 60 ", "conv 4 k5 s16777216"), 0, {"test accuracy"});
#if !defined(GYRE_SANITIZED)  // sanitizers need more than the limit
    expect_exit(train("ulimit -v 1000000; ", "conv 1 k3 p8000"), 1, {"gyre: out of memory; use a"});
#endif
}

TEST_CASE("an easy data set is learnt, its best weights kept, and evaluated to the same figures") {
    const Set set(640, 200, 1, 28, 28, 4);
    const std::string run = set.file("run"), json = set.file("log.jsonl");
    const std::string weights = run + "/best.safetensors";
    expect_exit(run_gyre(2, set.base + "--epochs 6 --lr 0.05 --save " + run + " --metrics " + json),
                0, {"2 ranks", "exposed communication", "saved"});
    const auto epochs = read_events(json, "epoch");
    REQUIRE(epochs.size() == 6);
    double best = 0.0, best_loss = 0.0;
    for (const auto& epoch : epochs) {
        for (const char* key :
             {"train_loss", "test_loss", "seconds", "images_per_second", "exposed_comm_seconds"}) {
            CHECK(epoch.at(key).get<double>() >= 0.0);
        }
        if (epoch.at("test_accuracy") > best) {
            best = epoch.at("test_accuracy");
            best_loss = epoch.at("test_loss");
        }
    }
    CHECK(best > 0.9);
    const auto end = read_events(json, "end").at(0);
    CHECK(end.at("best_test_accuracy") == best);
    CHECK(end.at("interrupted") == false);
    CHECK(end.at("peak_memory_bytes") > 1'000'000);
    // The model and the normalisation travel with the weights; the ranks change nothing.
    for (const int ranks : {0, 3}) {
        const Outcome outcome =
            run_gyre(ranks, "eval --data " + set.data + " --weights " + weights);
        char line[64];
        std::snprintf(line, sizeof line, "test accuracy %.2f %%", 100 * best);
        expect_exit(outcome, 0, {line});
        const auto at = outcome.output.find("test loss ");
        REQUIRE(at != std::string::npos);
        CHECK(std::stod(outcome.output.substr(at + 10)) == Approx(best_loss).epsilon(1e-5));
    }
    // Training resumes from them.
    const std::string more = set.file("more.jsonl");
    expect_exit(run_gyre(0, set.base + "--epochs 1 --no-shuffle --log-interval 1 --init " +
                                weights + " --metrics " + more),
                0, {});
    CHECK(read_events(more, "step").at(0).at("loss").get<double>() < 1.0);
    expect_exit(run_gyre(0, "eval --model wide --data " + set.data + " --weights " + weights), 3,
                {"shape", "another model"});
}

TEST_CASE("eval says how its data differ from what the weights were trained on", "[words]") {
    const Set set(60, 20, 1, 28, 28, 3);
    const std::string run = set.file("run"), other = set.file("other.safetensors");
    const std::string weights = run + "/last.safetensors";
    expect_exit(run_gyre(0, set.base + "--epochs 1 --save " + run), 0, {});
    using Metadata = std::map<std::string, std::string>;
    const auto eval = [&](int ranks, const Metadata& changes, const std::string& flags = "") {
        gyre::model::TensorFile file = gyre::train::read_weights(weights);
        file.metadata.erase("gyre.hash");
        for (const auto& [key, value] : changes) {
            file.metadata[key] = value;
        }
        gyre::model::write_safetensors(other, file);
        return run_gyre(
            ranks, "eval --threads 1 --data " + set.data + " --weights " + other + " " + flags);
    };
    CHECK(count_of(eval(0, {}).output, "gyre: ") == 0);
    // Each is said once, by rank 0.
    const auto expect_remark = [&](const Metadata& changes, const std::string& flags,
                                   std::initializer_list<std::string> parts) {
        const Outcome outcome = eval(2, changes, flags);
        expect_exit(outcome, 0, parts);
        CHECK(count_of(outcome.output, "gyre: ") == 1);
    };
    expect_remark({{"gyre.shape", "1x29x28"}}, "", {"images of 1x29x28", "1x28x28"});
    expect_remark({}, "--mean 0.9 --std 0.1", {"trained with mean 0.", "--std say mean 0.9"});
    expect_remark({{"gyre.data.mean", "0.9"}}, "", {"pixels of mean 0.9", "those of set have"});
    expect_remark({{"gyre.mean", ""}, {"gyre.std", ""}}, "", {"give --mean and --std"});

    const auto refuse = [&](const Metadata& changes, const std::string& remedy,
                            std::initializer_list<std::string> parts) {
        expect_exit(eval(0, changes), 3, parts);
        expect_exit(eval(0, changes, remedy), 0, {"test accuracy"});
    };
    for (const std::string classes : {"ten", "3x", "1", "-3", "70000", "99999999999999"}) {
        refuse({{"gyre.classes", classes}}, "--classes 3",
               {"other.safetensors", "gyre.classes '" + classes + "'", "give --classes"});
    }
    refuse({{"gyre.mean", "0.5,x"}}, "--mean 0.5 --std 0.5", {"gyre.mean '0.5,x'", "--mean"});
    refuse({{"gyre.std", "0"}}, "--mean 0.5 --std 0.5", {"gyre.std", "--mean"});
    refuse({{"gyre.mean", "1,1"}, {"gyre.std", "1,1"}}, "--mean 0.5 --std 0.5", {"1 channels"});
}

TEST_CASE("weights travel from and to PyTorch, and what is assumed is said once", "[words]") {
    const Set set(60, 20, 1, 28, 28, 3);
    const std::string run = set.file("run"), other = set.file("other.safetensors");
    const std::string weights = run + "/last.safetensors";
    expect_exit(run_gyre(0, set.base + "--epochs 1 --save " + run), 0, {});
    gyre::model::TensorFile file = gyre::train::read_weights(weights);
    file.metadata.erase("gyre.hash");
    for (gyre::model::HostTensor& tensor : file.tensors) {
        tensor.name = std::string("module.").append(tensor.name);
    }
    gyre::model::write_safetensors(other, file);
    for (const std::string& command : {set.base + "--epochs 1 --init " + other,
                                       "eval --data " + set.data + " --weights " + other}) {
        const Outcome outcome = run_gyre(2, command);
        expect_exit(outcome, 0, {"gyre: " + other + ": the prefix 'module.'"});
        CHECK(count_of(outcome.output, "gyre: ") == 1);
    }
    for (const std::string name : {"w.pt", "w.PTH", "w.pkl", "w.safetensors"}) {
        expect_exit(run_gyre(0, set.base + "--save " + set.file(name)), 2,
                    {"--save", name, "a folder", "safetensors.torch.load_file"});
    }
}

TEST_CASE("wrong flags are refused with exit code 2, once", "[words]") {
    const Set set(20, 4, 1, 28, 28, 2);
    const auto refuse = [&](const std::string& flags, std::initializer_list<std::string> parts) {
        INFO(flags);
        expect_exit(run_gyre(0, set.base + flags), 2, parts);
    };
    refuse("--no-such-flag", {"--no-such-flag"});
    refuse("--epochs 0", {"--epochs", ">= 1"});
    refuse("--batch-size -3", {"--batch-size"});
    refuse("--lr=-1", {"--lr"});
    refuse("--lr nan", {"--lr"});
    refuse("--limit 0", {"--limit"});
    for (const char* rate : {"inf", "1e999", "-inf"}) {
        refuse("--lr=" + std::string(rate), {"--lr", rate, "a finite number >= 0"});
        refuse("--lr-schedule cosine --lr-min=" + std::string(rate), {"--lr-min", "finite"});
    }
    for (const char* seed : {"-1", "18446744073709551616", "1.5", "+1"}) {
        refuse("--seed=" + std::string(seed), {"--seed", seed, "from 0 to 18446744073709551615"});
    }
    // Products that no kernel counts to.
    refuse("--shards 67108864", {"--shards", "from 0 to 65536"});
    refuse("--virtual-ranks many", {"--virtual-ranks", "'many'"});
    refuse("--batch-size 1073741824 --accumulate 4", {"4294967296 images", "lower --batch-size"});
    refuse("--batch-size 65536 --shards 65536", {"4294967296 images", "--virtual-ranks"});
    for (const char* device : {"cuda", "emulated"}) {
        refuse("--no-cuda --device " + std::string(device), {"--no-cuda", "contradicts --device"});
    }
    refuse("--mean inf --std 1", {"--mean: 'inf'"});
    refuse("--mean 0.1 --std inf", {"--std: 'inf'"});
    refuse("--optimizer rprop", {"rprop"});
    refuse("--bucket-kib 0", {"--bucket-kib", "auto"});
    refuse("--batch-size 3 --global-batch 4", {"--global-batch"});
    refuse("--mean 0.1", {"--mean and --std"});
    refuse("--mean 0.1 --std 0", {"--std 0"});
    refuse("--mean 0.1,0.2 --std 1,1", {"2 values", "1 channels"});
    refuse("--nesterov --momentum 0", {"--nesterov"});
    refuse("--momentum 1", {"--momentum"});
    refuse("--device cpu --precision tf32", {"--precision tf32", "uses the CPU"});
    refuse("--tf32", {"--precision tf32"});
    refuse("--precision int8", {"--precision", "fp32, tf32, bf16, fp16"});
    refuse("--device emulated --kernels cudnn", {"--kernels ours"});
    refuse("--device emulated --kernels auto --deterministic", {"--deterministic", "timings"});
    refuse("--device cpu --graph on", {"--graph on", "uses the CPU"});
    refuse("--graph perhaps", {"--graph"});
    expect_exit(run_gyre(2, set.base + "--device emulated --graph on"), 2,
                {"--graph on", "through the host's memory"});
    expect_exit(run_gyre(0, set.base + "--epochs 1 --device emulated --graph on -v"), 0,
                {"CUDA graph: a step", "step: fused: a training pass is one kernel"});
    expect_exit(run_gyre(0, set.base + "--epochs 1 --device emulated --augment hflip -v"), 0,
                {"step: layer by layer: augmentation is not in the fused pass"});
    expect_exit(
        run_gyre(0, set.base + "--epochs 1 --device emulated --graph on --graph-steps 3 -v"), 0,
        {"CUDA graph: 3 steps"});
    refuse("--graph-steps 0", {"--graph-steps"});
    refuse("--graph-steps 2 --check-sync 3", {"--graph-steps", "--check-sync"});
    refuse("--max-grad-norm=-1", {"--max-grad-norm"});
    refuse("--device emulated --kernels mine", {"--kernels", "mine"});
    const Outcome outcome = run_gyre(3, set.base + "--optimizer rprop");
    CHECK(count_of(outcome.output, "'rprop'") == 1);
    expect_exit(run_gyre(0, ""), 2, {"subcommand"});
}

TEST_CASE("flags that change nothing beside the others are named, by rank 0", "[words]") {
    const Set set(20, 4, 1, 28, 28, 2);
    const auto ignored = [&](int ranks, const std::string& flags) {
        const Outcome outcome = run_gyre(ranks, set.base + "--epochs 1 " + flags);
        expect_exit(outcome, 0, {"test accuracy"});
        std::string names;
        std::istringstream lines(outcome.output);
        for (std::string line; std::getline(lines, line);) {
            if (line.ends_with(", which is not given: ignored")) {
                names += line.substr(6, line.find(" is for ") - 6) + " ";
            }
        }
        return names;
    };
    CHECK(ignored(2, "--betas 0.5,0.75 --eps 1e-6") == "--betas --eps ");
    CHECK(ignored(0, "--optimizer adam --momentum 0.9 --overwrite --trace-steps 3") ==
          "--momentum --overwrite --trace-steps ");
    CHECK(ignored(0, "--optimizer adamw --betas 0.5,0.75 --eps 1e-6 --trace-steps 1 --trace " +
                         set.file("trace") + " --overwrite --save " + set.file("run")) == "");
    CHECK(ignored(0, "--momentum 0.5 --device auto --no-cuda") == "");
    CHECK(ignored(0, "--optimizer lion --alpha 0.5 --betas 0.5,0.75") == "--alpha ");
    CHECK(ignored(0, "--optimizer rmsprop --alpha 0.5 --betas 0.5,0.75") == "--betas ");
}

TEST_CASE("a GPU that is not there is refused with a hint") {
    if (gyre::cuda_device_count() > 0) {
        WARN("skipped: there is a GPU");
        return;
    }
    const Set set(20, 4, 1, 28, 28, 2);
    expect_exit(run_gyre(0, set.base + "--device cuda"), 2, {"--device cpu"});
    expect_exit(run_gyre(0, set.base + "--epochs 1 --device auto"), 0, {"CPU"});
}

TEST_CASE("wrong input is refused with exit code 3, once, on all ranks", "[words]") {
    const Set set(20, 4, 1, 28, 28, 2);
    for (const int ranks : {0, 3}) {
        const Outcome outcome = run_gyre(ranks, "train --data no-such-set");
        INFO(outcome.output);
        CHECK(outcome.exit_code == 3);
        CHECK(count_of(outcome.output, "gyre: ") == 1);
        check_contains(outcome.output, {"no-such-set"});
    }
    expect_exit(run_gyre(0, set.base + "--model none"), 3, {"none", "net, wide"});
    expect_exit(run_gyre(0, set.base + "--model " + set.dir.path().string()), 3,
                {set.dir.path().string() + "' is neither built in", "nor a file"});
    expect_exit(run_gyre(0, set.base + "--init none"), 3, {"none"});
    expect_exit(run_gyre(2, set.base + "--metrics /no/such/folder/x"), 3, {"--metrics", "rank 0"});
    // Before any work is done that could not be kept.
    const Outcome unsaved = run_gyre(2, set.base + "--epochs 1 --save /proc/no/x");
    expect_exit(unsaved, 3, {"--save", "/proc/no/x", "rank 0"});
    CHECK(count_of(unsaved.output, "epoch 1/1") == 0);
    std::ofstream(set.file("set/train-labels-idx1-ubyte"), std::ios::trunc) << "rubbish";
    expect_exit(run_gyre(2, set.base), 3, {"train-labels-idx1-ubyte"});
}

TEST_CASE("ranks started alike must be alike") {
    const Set set(40, 4, 1, 28, 28, 2), other(40, 4, 1, 28, 28, 2);
    std::fstream(other.file("set/train-images-idx4-ubyte"), std::ios::in | std::ios::out).seekp(500)
        << "x";
    const std::string shell =
        std::string(GYRE_MPIRUN) + " 3 bash -c '" + gyre_binary() +
        " train --threads 1 --epochs 1 --data $([ $OMPI_COMM_WORLD_RANK = 2 ] && echo ";
    expect_exit(run_shell(shell + other.data + " || echo " + set.data + ")'"), 4,
                {"the data set differs", "rank 2"});
    expect_exit(run_shell(shell + set.data + " --lr 0.5 || echo " + set.data + " --lr 0.25)'"), 4,
                {"flag --lr differs", "0.25", "0.5"});
    expect_exit(run_shell(shell + set.data + " --bucket-kib 1 || echo " + set.data + ")'"), 4,
                {"differs"});
}

TEST_CASE("a launcher whose ranks cannot find each other is refused with a hint", "[words]") {
    const Set set(20, 4, 1, 28, 28, 2);
    const auto refuse = [&](const std::string& environment, const std::string& flags,
                            std::initializer_list<std::string> parts) {
        INFO(environment << flags);
        expect_exit(run_shell(environment + " " + gyre_command(0, set.base + flags)), 4, parts);
    };
    // MPICH's mpiexec, without a library that has its interface, and with a foreign one.
    refuse("PMI_SIZE=4 GYRE_MPI_LIBRARY=/none.so", "",
           {"/none.so", "MPICH 5", "libmpi_abi.so.1", "GYRE_MPI_LIBRARY", "gyre launch"});
    refuse("PMI_SIZE=4 GYRE_MPI_LIBRARY=libz.so.1", "",
           {"libz.so.1 does not have the standard binary interface of MPI 5.0"});
    // A program that does not find the module of MPI.
    const std::string alone = set.file("gyre");
    std::filesystem::copy_file(gyre_binary(), alone);
    const std::string ranks = "OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_RANK=0 ";
    expect_exit(run_shell(ranks + alone + " " + set.base), 4,
                {"MPI could not be loaded", "openmpi-bin", "gyre launch"});
    expect_exit(run_shell(alone + " info"), 0, {"MPI                not found"});
    refuse("SLURM_STEP_NUM_TASKS=4 SLURM_PROCID=0 PMIX_RANK=0", "",
           {"srun", "4 ranks", "--mpi=pmix"});
    refuse("WORLD_SIZE=4 RANK=0", "--comm mpi", {"WORLD_SIZE=4", "4 ranks", "mpirun"});
    // They say too little. (tests/program/launch_test.cpp has those that say enough.)
    refuse("WORLD_SIZE=4", "", {"its rank", "--rank", "mpirun"});
    refuse("RANK=0 WORLD_SIZE=4", "", {"MASTER_ADDR is not set", "--init-method"});
    refuse("RANK=0 WORLD_SIZE=4 MASTER_ADDR=localhost", "", {"MASTER_PORT is not set"});
    refuse("SLURM_STEP_NUM_TASKS=4 SLURM_PROCID=0", "", {"srun", "MASTER_ADDR", "--mpi=pmix"});
    expect_exit(run_shell("WORLD_SIZE=1 " + gyre_command(0, set.base + "--epochs 1")), 0, {});
}

TEST_CASE("a diverging training ends with exit code 5 on all ranks") {
    const Set set(640, 20, 1, 28, 28, 4);
    expect_exit(run_gyre(2, set.base + "--lr 1e30 --epochs 3"), 5,
                {"the gradient of fc2.bias became NaN or infinite in epoch 1, step ", "--lr"});
    expect_exit(run_gyre(2, set.base + "--device emulated --lr 1e30 --epochs 3 --max-grad-norm 1"),
                5, {"the gradient of fc2.bias became NaN or infinite in epoch 1, step "});
    // In the only step, after which nothing is trained any more.
    const std::string run = set.file("run");
    expect_exit(run_gyre(2, set.base + "--global-batch 640 --lr 1e38 --epochs 1 --save " + run), 5,
                {"the loss on the test images is ", "after epoch 1; lower --lr"});
    CHECK(!std::filesystem::exists(run + "/best.safetensors"));
}

TEST_CASE("--tune-buckets tries several sizes, and leaves no trace in the training") {
    const Set set(640, 20, 1, 28, 28, 4);
    const std::string json = set.file("log.jsonl");
    const auto loss = [&](const std::string& flags) {
        const Outcome outcome = run_gyre(
            2, set.base + "--epochs 1 --no-eval --bucket-kib 16 " + "--metrics " + json + flags);
        INFO(outcome.output);
        REQUIRE(outcome.exit_code == 0);
        return read_events(json, "epoch").at(0).at("train_loss").get<double>();
    };
    const Outcome outcome =
        run_gyre(2, set.base + "--epochs 1 --no-eval --tune-buckets --metrics " + json);
    expect_exit(outcome, 0, {"ms a step  (taken)"});
    CHECK(count_of(outcome.output, "--tune-buckets:") >= 2);
    CHECK(count_of(outcome.output, "(taken)") == 1);
    const double tuned = read_events(json, "epoch").at(0).at("train_loss");
    CHECK(tuned == loss(""));  // two ranks' gradients can be added in one order only
    expect_exit(run_gyre(0, set.base + "--tune-buckets --bucket-kib 16"), 2, {"--bucket-kib"});
}

TEST_CASE("Ctrl-C stops all ranks after the same step, and keeps the best weights") {
    const Set set(1600, 100, 1, 28, 28, 4);
    for (const char* signal : {"INT", "TERM"}) {
        for (const int ranks : {0, 3}) {
            const std::string json = set.file("log.jsonl"), run = set.file("run");
            std::filesystem::remove(json);
            std::filesystem::remove_all(run);
            // Stops the launcher (as a terminal would) once the second epoch has begun, however
            // long that takes on this machine.
            const Outcome outcome =
                run_shell(gyre_command(ranks, set.base + "--epochs 100000 --metrics " + json +
                                                  " --save " + run) +
                          " & pid=$!; for i in $(seq 6000); do grep -qs '\"epoch\":2' " + json +
                          " && break; sleep 0.05; done; kill -" + signal +
                          " $pid; begin=$(date +%s); wait $pid; code=$?; [ $(($(date +%s) - "
                          "begin)) -lt 60 ] || echo it took too long to stop; exit $code");
            INFO(signal << ", " << ranks << " ranks\n" << outcome.output);
            CHECK(outcome.exit_code != 0);
            CHECK(count_of(outcome.output, "it took too long to stop") == 0);
            CHECK(std::filesystem::exists(run + "/best.safetensors"));
            if (ranks == 0) {
                CHECK(outcome.exit_code == 130);
                check_contains(outcome.output, {"interrupted"});
                CHECK(read_events(json, "end").at(0).at("interrupted") == true);
            }
        }
    }
    // Only one rank is told to stop: the others follow, and the job ends in an orderly way.
    const std::string json = set.file("log.jsonl");
    std::filesystem::remove(json);
    const Outcome outcome =
        run_shell(std::string(GYRE_MPIRUN) + " 3 bash -c '" + gyre_binary() + " " + set.base +
                  "--epochs 100000 --metrics " + json +
                  " & pid=$!; if [ $OMPI_COMM_WORLD_RANK = 1 ]; then for i in $(seq 6000); do grep "
                  "-qs epoch " +
                  json + " && break; sleep 0.05; done; kill -TERM $pid; fi; wait $pid'");
    expect_exit(outcome, 130, {"interrupted: all ranks stopped after the same step"});
}

TEST_CASE("-v prints the buckets") {
    const Set set(20, 4, 1, 28, 28, 10);
    expect_exit(run_gyre(2, set.base + "--epochs 1 -v"), 0,
                {"bucket", "ready ms", "exposed ms", "fc2.bias fc2.weight fc1.bias fc1.weight",
                 "conv1.bias conv1.weight"});
    expect_exit(run_gyre(2, set.base + "--epochs 1 -v --comm-dtype bf16"), 0,
                {"(loss and counts)", " 8.0  all-reduce      fc2.bias"});
    const std::string normalised = set.file("normalised.model");
    std::ofstream(normalised) << "conv 4 k3\nbatchnorm\nrelu\nlinear classes\n";
    expect_exit(run_gyre(2, set.base + "--epochs 1 -v --model " + normalised), 0,
                {"sums within the passes (batch normalisation)"});
    // By what way each of them travels.
    expect_exit(run_gyre(3, set.base + "--epochs 1 -v --shards 4"), 0,
                {" fixed order     fc2.bias"});
    expect_exit(run_gyre(2, set.base + "--epochs 1 -v --bucket-kib 32 --shard-optimizer on"), 0,
                {" all-reduce      (loss and counts)", "  reduce-scatter  ",
                 "; each rank updates a share"});
    expect_exit(
        run_gyre(2, set.base + "--epochs 1 -v --batch-size 2 --factors on --virtual-ranks 0"), 0,
        {" factors         fc1.bias fc1.weight"});
    expect_exit(run_gyre(2, set.base + "--epochs 1 -v --bucket-kib 25600"), 0,
                {"fc2.bias fc2.weight fc1.bias fc1.weight conv2.bias"});
}
