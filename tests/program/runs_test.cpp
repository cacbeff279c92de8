// When a training ends by itself, what it learns with smoothed labels, flags from a file, and the
// files with its figures.
#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>

#include "model/safetensors.hpp"
#include "tests/program/gyre_process.hpp"
#include "tests/program/protobuf_reader.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/temp_dir.hpp"
#include "train/metrics.hpp"

using namespace gyre::test;

namespace {

struct Set {
    TempDir dir;
    std::string data = file("set");
    std::string base = "train --threads 1 --timeout 20 --log-interval 1 --data " + data + " ";
    Set() { make_dataset(data, 320, 100, 1, 28, 28, 4); }
    std::string file(const std::string& name) const { return (dir.path() / name).string(); }

    void refuse(const std::string& flags, int code, const std::string& part) const {
        const Outcome outcome = run_gyre(0, base + "--epochs 1 " + flags);
        INFO(flags << "\n" << outcome.output);
        CHECK(outcome.exit_code == code);
        CHECK(count_of(outcome.output, part) == 1);
        CHECK(count_of(outcome.output, "epoch 1/1") == 0);
    }
};

std::string write(const std::string& path, const std::string& text) {
    std::ofstream(path) << text;
    return path;
}

using Scalars = std::map<std::string, std::map<std::uint64_t, float>>;  // tag -> step -> value

// The scalars of TensorBoard's event file in a folder; checks that every record is whole.
Scalars scalars_in(const std::filesystem::path& folder) {
    REQUIRE(std::filesystem::exists(folder));
    std::string data;
    for (const auto& entry : std::filesystem::directory_iterator(folder)) {
        if (entry.is_regular_file()) {
            REQUIRE(data.empty());
            data = file_bytes(entry.path().string());
        }
    }
    std::size_t at = 0;
    Scalars found;
    while (at < data.size()) {
        std::uint64_t length = 0;
        std::memcpy(&length, data.data() + at, sizeof length);
        const std::string message = data.substr(at + 12, length);
        REQUIRE(gyre::train::tensorboard_record(message) == data.substr(at, length + 16));
        at += length + 16;
        const auto event = read_proto(message);
        REQUIRE(event.size() == 3);
        REQUIRE(event[0].number == 1);  // wall_time, a double
        REQUIRE(event[1].number == 2);
        if (event[2].number == 3) {
            CHECK(event[2].bytes == "brain.Event:2");
            continue;
        }
        REQUIRE(event[2].number == 5);
        for (const std::string& value : texts_of(read_proto(event[2].bytes), 1)) {
            const auto fields = read_proto(value);
            if (fields.size() == 3) {
                CHECK(fields[0].bytes == "settings");
                CHECK(count_of(fields[1].bytes, "| setting | value |\n|---|---|\n| ") == 1);
                CHECK(fields[2].number == 9);  // metadata
                continue;
            }
            REQUIRE(fields.size() == 2);
            REQUIRE(fields[1].number == 2);
            std::memcpy(&found[fields[0].bytes][event[1].value], fields[1].bytes.data(),
                        sizeof(float));
        }
    }
    return found;
}

// The scalars of a training, under the names that they have in --metrics.
Scalars scalars(const std::filesystem::path& folder) {
    Scalars found = scalars_in(folder);
    for (const std::string images : {"train", "test"}) {
        const Scalars of_images = scalars_in(folder / images);
        CHECK(of_images.size() == 2);
        for (const char* figure : {"loss", "accuracy"}) {
            const std::string tag = std::string("epoch/") + figure;
            REQUIRE(of_images.count(tag) == 1);
            CHECK(found.count(tag) == 0);
            found["epoch/" + images + "_" + figure] = of_images.at(tag);
        }
    }
    return found;
}

}  // namespace

TEST_CASE("a training ends after the epoch that reaches --target-accuracy") {
    const Set set;
    for (const int ranks : {0, 2}) {
        const std::string json = set.file("log");
        const Outcome outcome = run_gyre(
            ranks, set.base + "--epochs 40 --lr 0.1 --target-accuracy 60 --metrics " + json);
        INFO(outcome.output);
        REQUIRE(outcome.exit_code == 0);
        const auto epochs = read_events(json, "epoch");
        REQUIRE(epochs.size() < 40);
        for (const auto& epoch : epochs) {
            CHECK((epoch.at("test_accuracy") >= 0.6) == (&epoch == &epochs.back()));
        }
        CHECK(read_events(json, "end").at(0).at("ending") == "target-accuracy");
        CHECK(count_of(outcome.output, "--target-accuracy 60: reached") == 1);
    }
    set.refuse("--target-accuracy 60 --no-eval", 2, "--target-accuracy needs the evaluation");
    set.refuse("--target-accuracy 0.9", 2, "'0.9' must be a number from 1 to 100");
}

TEST_CASE("a training ends after --patience epochs that are not better") {
    const Set set;
    const std::string json = set.file("log.jsonl");
    // No epoch can be better than the first.
    const Outcome outcome =
        run_gyre(2, set.base + "--epochs 40 --lr 0 --patience 3 --metrics " + json);
    INFO(outcome.output);
    CHECK(outcome.exit_code == 0);
    CHECK(read_events(json, "epoch").size() == 4);
    CHECK(read_events(json, "end").at(0).at("ending") == "patience");
    CHECK(count_of(outcome.output, "--patience 3: reached") == 1);
    set.refuse("--patience 3 --no-eval", 2, "--patience needs the evaluation");
    // Epochs before the training is resumed count: the first is still the best.
    const std::string run = set.file("run"), later = set.file("later.jsonl");
    const std::string base = set.base + "--epochs 40 --lr 0 --save " + run;
    CHECK(run_gyre(2, base + " --patience 3").exit_code == 0);
    const Outcome again = run_gyre(
        2, set.base + "--epochs 40 --lr 0 --patience 5 --resume " + run + " --metrics " + later);
    INFO(again.output);
    CHECK(again.exit_code == 0);
    const auto epochs = read_events(later, "epoch");
    REQUIRE(epochs.size() == 2);
    CHECK(epochs.back().at("epoch") == 6);
}

TEST_CASE("--val-split: held-out images decide, and the test images are evaluated once") {
    const Set set;
    const std::string json = set.file("log.jsonl"), run = set.file("run");
    const Outcome outcome =
        run_gyre(2, set.base + "--epochs 3 --val-split 0.25 --save " + run + " --metrics " + json);
    INFO(outcome.output);
    REQUIRE(outcome.exit_code == 0);
    const auto start = read_events(json, "start").at(0);
    const auto val = start.at("val_images").get<int>();
    CHECK(val > 60);
    CHECK(val <= 80);
    CHECK(start.at("train_images").get<int>() + val == 320);
    CHECK(start.at("test_images") == 100);
    double best = 0.0;
    for (const auto& epoch : read_events(json, "epoch")) {
        CHECK(!epoch.contains("test_accuracy"));
        CHECK(epoch.contains("val_loss"));
        best = std::max(best, epoch.at("val_accuracy").get<double>());
    }
    const auto end = read_events(json, "end").at(0);
    CHECK(end.at("best_val_accuracy") == best);
    CHECK(!end.contains("best_test_accuracy"));
    CHECK(count_of(outcome.output, "val accuracy") == 4);  // of each epoch, and the best
    CHECK(count_of(outcome.output, "test accuracy") == 1);
    // The test accuracy is that of the best weights, as they were saved.
    const Outcome evaluated =
        run_gyre(0, "eval --data " + set.data + " --weights " + run + "/best.safetensors");
    const auto right = std::lround(100.0 * end.at("test_accuracy").get<double>());
    CHECK(count_of(evaluated.output, "(" + std::to_string(right) + "/100)") == 1);
    CHECK(count_of(outcome.output, "(" + std::to_string(right) + "/100)") == 1);
    set.refuse("--val-split 0.25 --no-eval", 2, "--no-eval");
    set.refuse("--val-split 1", 2, "'1' must be a number from 0.001 to 0.9");
}

TEST_CASE("--finetune trains a new head on weights of a net with fewer classes") {
    const Set set;
    const std::string first = set.file("first") + "/last.safetensors",
                      second = set.file("second") + "/last.safetensors";
    REQUIRE(run_gyre(0, set.base + "--epochs 1 --save " + set.file("first")).exit_code == 0);
    const std::string more = "--classes 12 --init " + first;
    set.refuse(more, 3, "'fc2.bias' has shape [4], but the net needs [12]");
    const Outcome outcome = run_gyre(2, set.base + more + " --epochs 1 --finetune --save " +
                                            set.file("second") + " --freeze 'conv*,fc1.*'");
    INFO(outcome.output);
    REQUIRE(outcome.exit_code == 0);
    CHECK(count_of(outcome.output, "these are initialised: fc2.weight [12, 50], fc2.bias [12];") ==
          1);
    std::map<std::string, std::vector<float>> before, after;
    for (auto [file, values] : {std::pair(first, &before), std::pair(second, &after)}) {
        for (const gyre::model::HostTensor& tensor : gyre::model::read_safetensors(file).tensors) {
            (*values)[tensor.name] = tensor.values;
        }
    }
    for (const char* name : {"conv1.weight", "conv1.bias", "conv2.weight", "fc1.bias"}) {
        CHECK(after.at(name) == before.at(name));
    }
    CHECK(after.at("fc2.bias").size() == 12);
    CHECK(count_of(run_gyre(0, set.base + "--epochs 1 --finetune").output,
                   "--finetune is for --init, which is not given: ignored") == 1);
}

TEST_CASE("--lr-schedule plateau lowers the rate, and its count of epochs survives a resume") {
    const Set set;
    // The rate is so small that the loss stays as it is.
    const std::string flags =
        set.base +
        "--batch-size 160 --lr 1e-12 --lr-schedule plateau --lr-patience 1 --lr-gamma 0.5 ";
    const auto rates = [&](const std::string& json) {
        std::map<int, double> of_epochs;
        for (const auto& step : read_events(json, "step")) {
            of_epochs[step.at("epoch").get<int>()] = 1e12 * step.at("learning_rate").get<double>();
        }
        return of_epochs;
    };
    const std::string whole = set.file("whole.jsonl"), part = set.file("part.jsonl"),
                      run = set.file("run");
    REQUIRE(run_gyre(2, flags + "--epochs 7 --metrics " + whole).exit_code == 0);
    const std::vector<double> expected = {1.0, 1.0, 1.0, 0.5, 0.5, 0.25, 0.25};
    const auto found = rates(whole);
    REQUIRE(found.size() == expected.size());
    for (const auto& [epoch, rate] : found) {
        INFO("epoch " << epoch);
        CHECK(rate == Approx(expected.at(static_cast<std::size_t>(epoch - 1))));
    }
    REQUIRE(run_gyre(2, flags + "--epochs 4 --save " + run).exit_code == 0);
    REQUIRE(run_gyre(2, flags + "--epochs 7 --resume " + run + " --metrics " + part).exit_code ==
            0);
    const auto resumed = rates(part);
    CHECK(resumed.size() == 3);
    for (const auto& [epoch, rate] : resumed) {
        INFO("epoch " << epoch);
        CHECK(rate == found.at(epoch));
    }
    set.refuse("--lr-schedule plateau --no-eval", 2, "--lr-schedule plateau needs the evaluation");
}

TEST_CASE("metrics of a training that resumes have each step once") {
    const Set set;
    const std::string flags = set.base + "--batch-size 8 --epochs 3 ";
    for (const char* ending : {".jsonl", ".csv"}) {
        INFO(ending);
        const std::string metrics = set.file(std::string("metrics") + ending),
                          run = set.file(std::string("run") + ending);
        REQUIRE(run_gyre(2, flags + "--keep 99 --save-every 4steps --save " + run + " --metrics " +
                                metrics)
                    .exit_code == 0);
        const auto figures = [&] {  // of steps and epochs, without times
            std::vector<std::string> lines;
            std::ifstream in(metrics);
            for (std::string line; std::getline(in, line);) {
                const bool row = line.starts_with("step,") || line.starts_with("epoch,");
                if (row || line.starts_with(R"({"event":"step")") ||
                    line.starts_with(R"({"event":"epoch")")) {
                    const std::size_t seconds = line.find("\"seconds\"");
                    lines.push_back(row ? line.substr(0, line.find(',', line.find(',', 6) + 1))
                                        : line.substr(0, seconds));
                }
            }
            return lines;
        };
        const auto whole = figures();
        REQUIRE(whole.size() > 20);
        std::ofstream(metrics, std::ios::app) << "cut off";
        int resumed = 0;
        for (const auto& file : std::filesystem::directory_iterator(run)) {
            if (file.path().filename().string().starts_with("step-")) {
                ++resumed;
                INFO(file.path().filename());
                const Outcome outcome = run_gyre(
                    2, flags + "--metrics " + metrics + " --resume " + file.path().string());
                INFO(outcome.output);
                REQUIRE(outcome.exit_code == 0);
                CHECK(figures() == whole);
            }
        }
        CHECK(resumed > 3);
        std::ifstream in(metrics);
        const std::string text{std::istreambuf_iterator<char>(in),
                               std::istreambuf_iterator<char>()};
        CHECK(text.find("cut off") == text.npos);
    }
}

TEST_CASE("--class-weights weighs the loss by classes, and equal weights change nothing") {
    const Set set;
    const auto loss = [&](const std::string& flags) {
        const std::string json = set.file("log.jsonl");
        const Outcome outcome =
            run_gyre(2, set.base + "--epochs 1 --metrics " + json + " " + flags);
        INFO(outcome.output);
        REQUIRE(outcome.exit_code == 0);
        return read_events(json, "epoch").at(0).at("train_loss").get<double>();
    };
    const double plain = loss("");
    CHECK(loss("--class-weights 3,3,3,3") == plain);
    CHECK(loss("--class-weights 1,2,3,4") != plain);
    CHECK(loss("--class-weights auto") > 0.0);
    set.refuse("--class-weights 1,2", 2, "2 numbers, but there are 4 classes");
    set.refuse("--class-weights 0,0,0,0", 2, "no training image has a weight above 0");
    set.refuse("--class-weights 1,-2,3,4", 2, "'-2'");
}

TEST_CASE("--ema: the average is evaluated and saved as the best, and resumes with the training") {
    const Set set;
    const std::string whole = set.file("whole"), part = set.file("part"),
                      json = set.file("log.jsonl");
    const std::string flags = set.base + "--ema 0.875 --batch-size 16 --lr 0.05 ";
    REQUIRE(run_gyre(2, flags + "--epochs 3 --metrics " + json + " --save " + whole).exit_code ==
            0);
    REQUIRE(run_gyre(2, flags + "--epochs 2 --save " + part).exit_code == 0);
    const Outcome resumed = run_gyre(2, flags + "--epochs 3 --save " + part + " --resume " + part);
    INFO(resumed.output);
    REQUIRE(resumed.exit_code == 0);
    for (const char* name : {"/last.safetensors", "/best.safetensors"}) {
        CHECK(file_bytes(whole + name) == file_bytes(part + name));
    }
    double best = 0.0;
    for (const auto& epoch : read_events(json, "epoch")) {
        best = std::max(best, epoch.at("test_accuracy").get<double>());
    }
    const auto evaluated = [&](const std::string& file) {
        return run_gyre(0, "eval --data " + set.data + " --weights " + file).output;
    };
    const std::string right = "(" + std::to_string(std::lround(100.0 * best)) + "/100)";
    CHECK(count_of(evaluated(whole + "/best.safetensors"), right) == 1);
    // The average alone, from which no training can be resumed.
    const std::string one = set.file("one");
    REQUIRE(run_gyre(2, flags + "--epochs 1 --save " + one).exit_code == 0);
    const auto tensors = [](const std::string& file) {
        std::map<std::string, std::vector<float>> all;
        for (const auto& tensor : gyre::model::read_safetensors(file).tensors) {
            all[tensor.name] = tensor.values;
        }
        return all;
    };
    const auto last = tensors(one + "/last.safetensors");
    const auto averages = tensors(one + "/best.safetensors");
    CHECK(averages.size() == 8);
    for (const auto& [name, values] : averages) {
        INFO(name);
        CHECK(values == last.at("optimizer." + name + ".ema"));
        CHECK(values != last.at(name));
    }
    const Outcome refused =
        run_gyre(2, flags + "--epochs 4 --resume " + whole + "/best.safetensors");
    CHECK(refused.exit_code == 3);
    CHECK(count_of(refused.output, "the optimiser's state lacks step") == 1);
    const Outcome without =
        run_gyre(2, set.base + "--batch-size 16 --lr 0.05 --epochs 4 --resume " + whole);
    CHECK(without.exit_code == 3);
    CHECK(count_of(without.output, "`ema`") + count_of(without.output, "--ema") == 1);
}

TEST_CASE("--max-seconds ends a training like an interrupt, but with success") {
    const Set set;
    for (const int ranks : {0, 2}) {
        const std::string json = set.file("log"), last = set.file("last" + std::to_string(ranks));
        const Outcome outcome = run_gyre(
            ranks, set.base + "--epochs 1000000 --no-eval -q --max-seconds 0.5 --metrics " + json +
                       " --overwrite --save " + last);
        INFO(outcome.output);
        REQUIRE(outcome.exit_code == 0);
        const auto end = read_events(json, "end").at(0);
        CHECK(end.at("ending") == "max-seconds");
        CHECK(end.at("seconds") >= 0.5);
        CHECK(std::filesystem::exists(last));
    }
    const Outcome at_once = run_gyre(2, set.base + "--max-seconds 0");
    INFO(at_once.output);
    CHECK(at_once.exit_code == 0);
    CHECK(count_of(at_once.output, "--max-seconds 0: all ranks stopped") == 1);
}

TEST_CASE("smoothed labels change the training's loss alike on all devices, not the evaluation") {
    const Set set;
    const auto train = [&](const std::string& flags) {
        const std::string json = set.file("log");
        const Outcome outcome =
            run_gyre(0, set.base + "--limit 128 --epochs 1 --lr 0 --metrics " + json + " " + flags);
        INFO(outcome.output);
        REQUIRE(outcome.exit_code == 0);
        return std::pair(read_events(json, "step").at(1).at("loss").get<double>(),
                         read_events(json, "epoch").at(0).at("test_loss").get<double>());
    };
    // On a GPU the second has the last layer together with the loss, if labels are not smoothed.
    write(set.file("fours"), "linear 64\nrelu\nlinear classes\n");
    for (const std::string& model : {std::string("net"), set.file("fours")}) {
        const auto losses = [&](const std::string& flags) {
            return train("--model " + model + " " + flags);
        };
        const auto smooth_cpu = losses("--label-smoothing 0.5 --device cpu");
        for (const std::string device : {"cpu", "emulated"}) {
            const auto plain = losses("--device " + device);
            const auto smooth = losses("--label-smoothing 0.5 --device " + device);
            CHECK(smooth.second == plain.second);
            CHECK(smooth.first != plain.first);
            CHECK(smooth.first == Approx(smooth_cpu.first));
        }
    }
    set.refuse("--label-smoothing 1", 2, "must be a number from 0 to");
}

TEST_CASE("--config has flags in TOML, which the command line overrides and the ranks compare") {
    const Set set;
    const std::string config = write(set.file("c.toml"),
                                     "# flags\nepochs = 2\nlr = 0.25\nno_dropout = true\nverbose = "
                                     "false\nbetas = [0.5, 0.75]\n");
    const auto losses = [&](const std::string& flags) {
        const std::string json = set.file("log");
        const Outcome outcome = run_gyre(0, set.base + "--metrics " + json + " " + flags);
        INFO(outcome.output);
        REQUIRE(outcome.exit_code == 0);
        std::string text;
        for (const auto& step : read_events(json, "step")) {
            text += step.at("loss").dump() + " " + step.at("learning_rate").dump() + "\n";
        }
        return text;
    };
    CHECK(losses("--config " + config) ==
          losses("--epochs 2 --lr 0.25 --no-dropout --betas 0.5,0.75"));
    CHECK(losses("--epochs 1 --config=" + config) == losses("--epochs 1 --lr 0.25 --no-dropout"));
    const std::string sections = write(set.file("d.ini"), "[train]\nepochs=1\n");
    CHECK(losses("--config " + sections) == losses("--epochs 1"));
    set.refuse("--config " + set.file("none"), 2, "is not a file that can be read");
    set.refuse("--config " + set.dir.path().string(), 2, "is not a file that can be read");
    // A file without an end, or all but one, is read no further than a person writes.
    const std::string zeros = write(set.file("zeros"), "");
    std::filesystem::resize_file(zeros, 2 << 20);
    for (const char* flag : {"--config ", "--model "}) {
        set.refuse(flag + zeros, std::string(flag) == "--model " ? 3 : 2, "it has more than 1 MiB");
    }
    set.refuse("--model " + set.dir.path().string(), 3, "nor a file that can be read: Is a dir");
    set.refuse("--config " + write(set.file("e"), "epcohs = 2\n"), 2, "did you mean --epochs?");
    set.refuse("--config " + write(set.file("f"), "[eval]\nlr = 2\n"), 2,
               "the only section is [train]");
    set.refuse("--config " + write(set.file("g"), "config = \"x\"\n"), 2,
               "a file cannot name another");
    for (const char* value : {"fast", "-1"}) {
        const std::string file = write(set.file("h"), "seed = 1\nlr = " + std::string(value));
        set.refuse("--config " + file, 2,
                   "gyre: config " + file + ", line 2: --lr: '" + value + "'");
    }
    // The command line's value is another, and so is its device.
    const std::string device = write(set.file("j"), "device = \"cuda\"\nepochs = 1\n");
    CHECK(losses("--no-cuda --config " + device) == losses("--epochs 1"));
    const Outcome differ = run_shell(
        "timeout -k 1 60 " + std::string(GYRE_MPIRUN) + " 2 bash -c 'cd " +
        set.dir.path().string() + " && mkdir -p $OMPI_COMM_WORLD_RANK && cd $OMPI_COMM_WORLD_RANK" +
        " && echo \"seed = $OMPI_COMM_WORLD_RANK\" > c && exec " + gyre_binary() + " " + set.base +
        "--config c'");
    INFO(differ.output);
    CHECK(differ.exit_code == 4);
    CHECK(count_of(differ.output, "flag --seed differs") == 1);
}

TEST_CASE("--metrics and --tensorboard have the same figures") {
    const Set set;
    const std::string csv = set.file("m.csv"), folder = set.file("a/b"), json = set.file("m.json");
    const std::string flags = set.base + "--epochs 2 --max-grad-norm 1 --metrics ";
    const Outcome outcome = run_gyre(2, flags + csv + " --tensorboard " + folder);
    INFO(outcome.output);
    REQUIRE(outcome.exit_code == 0);
    const std::string jsonl = set.file("m.jsonl");
    REQUIRE(run_gyre(2, flags + jsonl).exit_code == 0);
    auto expected = read_events(jsonl, "step");
    // The gradients' norm is that of all ranks', also where each has a share of them.
    const std::string shares = set.file("shares.jsonl");
    REQUIRE(run_gyre(2, flags + shares + " --shard-optimizer on").exit_code == 0);
    const auto of_shares = read_events(shares, "step");
    REQUIRE(of_shares.size() == expected.size());
    CHECK(expected[0].at("grad_norm").get<double>() > 0.0);
    CHECK(of_shares[0].at("grad_norm").get<double>() ==
          Approx(expected[0].at("grad_norm").get<double>()).epsilon(1e-6));
    for (const auto& epoch : read_events(jsonl, "epoch")) {
        expected.insert(expected.begin() + epoch.at("epoch").get<int>() * 4 - 1, epoch);
    }
    const auto found = scalars(folder);
    std::istringstream rows(file_bytes(csv));
    std::string row;
    std::getline(rows, row);
    CHECK(row ==
          "event,epoch,step,loss,learning_rate,train_loss,train_accuracy,test_loss,test_accuracy,"
          "seconds,train_seconds,images_per_second,exposed_comm_seconds,loss_scale,skipped,"
          "val_loss,val_accuracy,grad_norm");
    std::vector<std::string> columns;
    std::istringstream header(row);
    for (std::string column; std::getline(header, column, ',');) {
        columns.push_back(column);
    }
    REQUIRE(expected.size() == 8);
    for (const auto& event : expected) {
        REQUIRE(std::getline(rows, row));
        std::istringstream cells(row);
        std::string cell;
        for (const std::string& column : columns) {
            std::getline(cells, cell, ',');
            const bool time = column.find("second") != column.npos;
            const bool has = event.contains(column);
            INFO(row << "\n" << column);
            CHECK((cell.empty() || !cells) == !has);
            cells.clear();
            if (has && !time && event.at(column).is_number()) {
                CHECK(std::stod(cell) == event.at(column).get<double>());
                if (column != "step" && column != "epoch") {
                    const std::string tag = event.at("event").get<std::string>() + "/" + column;
                    REQUIRE(found.count(tag) == 1);
                    CHECK(found.at(tag).at(event.at("step").get<std::uint64_t>()) ==
                          event.at(column).get<float>());
                }
            }
            cell.clear();
        }
    }
    CHECK(!std::getline(rows, row));
    set.refuse("--metrics x.txt", 2, "must end in .csv or .jsonl");
    set.refuse("--json y", 2, "--json: --metrics FILE.jsonl");
    set.refuse("--metrics " + set.file("none/x.csv"), 3, "--metrics ");
    set.refuse("--tensorboard " + csv, 3, "--tensorboard ");
    // The check value of CRC-32C (RFC 3720) is of "123456789", masked as TFRecords are.
    const std::string record = gyre::train::tensorboard_record("123456789");
    std::uint32_t crc = 0;
    std::memcpy(&crc, record.data() + record.size() - sizeof crc, sizeof crc);
    CHECK(crc == ((0xe3069283u >> 15 | 0xe3069283u << 17) + 0xa282ead8u));
}

TEST_CASE("a resumed training adds its rows to the --metrics file") {
    const Set set;
    const std::string csv = set.file("m.csv"), run = set.file("run");
    const std::string all =
        set.base + "--global-batch 160 --save " + run + " --metrics " + csv + " --epochs ";
    const auto rows = [&](const std::string& flags) {
        const Outcome outcome = run_gyre(0, all + flags);
        INFO(outcome.output);
        REQUIRE(outcome.exit_code == 0);
        std::string firsts;  // the first two columns
        std::istringstream lines(file_bytes(csv));
        for (std::string line; std::getline(lines, line);) {
            firsts += line.substr(0, line.find(',', line.find(',') + 1)) + "\n";
        }
        return firsts;
    };
    const std::string first = "event,epoch\nstep,1\nstep,1\nepoch,1\n";
    CHECK(rows("1") == first);
    CHECK(rows("2 --resume " + run) == first + "step,2\nstep,2\nepoch,2\n");
    CHECK(rows("1 --overwrite") == first);  // a new training's
}

TEST_CASE("a file that takes no more figures is named, with its flag") {
    const Set set;
    const std::string limited = "trap '' XFSZ; ulimit -f 1; ";
    for (const auto& [flag, name] : {std::pair{"--metrics", "a"},
                                     {"--metrics", "a.csv"},
                                     {"--metrics", "a.jsonl"},
                                     {"--tensorboard", "b"}}) {
        const std::string given = std::string(flag) + " " + set.file(name);
        const Outcome outcome =
            run_shell(limited + gyre_command(0, set.base + "-q --epochs 20 --no-eval " + given));
        INFO(outcome.output);
        CHECK(outcome.exit_code == 3);
        CHECK(count_of(outcome.output, "gyre: " + given + ": writing failed") == 1);
    }
}

TEST_CASE("gyre plot draws what --metrics wrote, and names a line that is none") {
    const Set set;
    const std::string csv = set.file("it's.csv"), jsonl = set.file("b.jsonl");
    REQUIRE(run_gyre(0, set.base + "--epochs 2 --metrics \"" + csv + "\"").exit_code == 0);
    REQUIRE(run_gyre(0, set.base + "--epochs 1 --no-eval --metrics " + jsonl).exit_code == 0);
    const auto plot = [&](const std::string& flags, int code, const std::string& part) {
        const Outcome outcome = run_gyre(0, "plot " + flags);
        INFO(flags << "\n" << outcome.output);
        CHECK(outcome.exit_code == code);
        CHECK(count_of(outcome.output, part) == 1);
    };
    const std::string bad = write(set.file("bad"), "{\"epoch\":1}\nx\n");
    plot(bad + " -o " + set.file("x.svg"), 3, bad + ", line 2: that is not a line");
    for (const char* epoch : {"0", "-1", "1e300"}) {
        write(bad, fmt::format("{{\"epoch\":{},\"step\":1}}\n", epoch));
        plot(bad + " -o " + set.file("x.svg"), 3, bad + ", line 1: that is not a line");
    }
    const std::string zeros = write(set.file("zeros"), "");
    std::filesystem::resize_file(zeros, 2 << 20);
    plot(zeros + " -o " + set.file("x.svg"), 3, zeros + ", line 1: that is not a line");
    write(set.file("long"), "{\"epoch\":1,\"step\":1}" + std::string(100000, ' '));
    plot(set.file("long") + " -o " + set.file("x.svg"), 3, "long, line 1: that is not a line");
    plot(set.file("none") + " --output " + set.file("x.svg"), 3, "no file with lines");
    plot(jsonl + " -o " + set.file("x.pdf"), 2, "must end in .svg or .png");
    plot(jsonl + " -o " + set.file("no/x.svg"), 3, "there is no folder");
    if (run_shell("command -v gnuplot").exit_code != 0) {
        WARN("no gnuplot here: nothing is drawn");
        plot(jsonl + " -o " + set.file("x.svg"), 3, "install it");
        return;
    }
    plot("\"" + csv + "\" " + jsonl + " -o " + set.file("x.svg"), 0, set.file("x.svg"));
    const std::string picture = file_bytes(set.file("x.svg"));
    for (const char* once : {" b.jsonl<", "s.csv<", ">each step<", ">train<", ">test<"}) {
        INFO(once);
        CHECK(count_of(picture, once) == 1);
    }
    // Files of the same name are shown with their folders.
    std::filesystem::create_directory(set.file("sub"));
    std::filesystem::copy_file(jsonl, set.file("sub/b.jsonl"));
    plot(jsonl + " " + set.file("sub/b.jsonl") + " -o " + set.file("y.svg"), 0, set.file("y.svg"));
    CHECK(count_of(file_bytes(set.file("y.svg")), " sub/b.jsonl<") == 1);
    CHECK(count_of(file_bytes(set.file("y.svg")), ">test<") == 0);  // nothing was evaluated
    // Where a training resumed, and on how many ranks.
    const std::string resumed = write(set.file("resumed"),
                                      R"({"ranks":4}
{"epoch":1,"step":5,"loss":2}
{"ranks":4,"steps_per_epoch":10,"resumed":{"epoch":1,"step":5}}
{"epoch":1,"step":10,"loss":1}
{"ranks":1,"steps_per_epoch":10,"resumed":{"epoch":2,"step":0}}
{"epoch":2,"step":20,"loss":0.5}
)");
    plot(resumed + " -o " + set.file("z.svg"), 0, "z.svg");
    CHECK(count_of(file_bytes(set.file("z.svg")), ">4 ranks<") == 0);
    CHECK(count_of(file_bytes(set.file("z.svg")), ">1 rank<") == 1);
    write(resumed, R"({"ranks":4,"steps_per_epoch":0,"resumed":{"epoch":1,"step":5}})");
    plot(resumed + " -o " + set.file("z.svg"), 3, "resumed, line 1: that is not a line");
    plot(jsonl + " -o " + set.file("x.png"), 0, "x.png");
    CHECK(file_bytes(set.file("x.png")).starts_with("\x89PNG"));
}

TEST_CASE("gyre info shows a net and a file of weights") {
    const Set set;
    const std::string weights = set.file("w") + "/best.safetensors";
    REQUIRE(run_gyre(0, set.base + "--epochs 1 --no-eval --save " + set.file("w")).exit_code == 0);
    const auto info = [&](const std::string& flags) {
        const Outcome outcome = run_gyre(0, "info " + flags);
        INFO(outcome.output);
        CHECK(outcome.exit_code == 0);
        return outcome.output;
    };
    const std::string net = info("--model net");
    CHECK(count_of(net, "conv2              [20, 8, 8]         5020         640000         5120") ==
          1);
    CHECK(count_of(net, "21840         961000") == 1);
    CHECK(count_of(info("--model net --image 3x32x32 --classes 7"), "[7] ") == 1);
    const std::string file = info("--weights " + weights);
    CHECK(count_of(file, "gyre.classes       4\n") == 1);
    CHECK(count_of(file, "conv1.weight       F32  [10, 1, 5, 5]\n") == 1);
    CHECK(info("--checkpoint " + weights) == file);
    CHECK(count_of(file, "gyre.cursor.epoch  2\n") == 1);
    const Outcome folder = run_gyre(0, "info --checkpoint " + set.file("w"));
    CHECK(folder.exit_code == 3);
    CHECK(count_of(folder.output, "a folder; name a file in it, such as " + weights) == 1);
    std::string bytes = file_bytes(weights);
    bytes.back() ^= 1;
    std::ofstream(weights, std::ios::binary) << bytes;
    const Outcome damaged = run_gyre(0, "info --checkpoint " + weights);
    CHECK(damaged.exit_code == 3);
    CHECK(count_of(damaged.output, "the file is damaged") == 1);
    // Weights only, which are not a checkpoint; and files that a checkpoint became by damage.
    const auto refused = [&](const std::string& content, const std::string& part) {
        std::ofstream(weights, std::ios::binary) << content;
        const Outcome outcome = run_gyre(0, "info --checkpoint " + weights);
        INFO(outcome.output);
        CHECK(outcome.exit_code == 3);
        CHECK(count_of(outcome.output, part) == 1);
    };
    const auto header = [](const std::string& json) {
        return std::string{static_cast<char>(json.size()), 0, 0, 0, 0, 0, 0, 0} + json;
    };
    bytes.back() ^= 1;
    refused(bytes + std::string(1 << 20, '\0'), "something was added");
    refused(header("{}"), "not the state of a training");
    refused(header("null"), "not a JSON object");
    std::string unhashed = bytes;
    unhashed.replace(unhashed.find("gyre.hash"), 9, "gyre.hush");
    refused(unhashed, "the hash of its content is missing");
    CHECK(run_gyre(0, "info --weights " + set.file("none")).exit_code == 3);
    CHECK(run_gyre(0, "info --model none.model").exit_code != 0);
    CHECK(count_of(info(""), "the last bits ") == 1);
}
