// Nets as ONNX models, read back field by field; tests/program/onnx_test.py runs them.
#include "model/onnx.hpp"
#include "kernels/make_backend.hpp"

#include <sys/stat.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <set>

#include "kernels/choose_cpu_kernels.hpp"
#include "model/net.hpp"
#include "tests/program/gyre_process.hpp"
#include "tests/program/protobuf_reader.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/temp_dir.hpp"

using namespace gyre;
using namespace gyre::model;
using namespace gyre::test;
namespace fs = std::filesystem;

namespace {

// Every operation, and a sum of a flat value and one with planes.
constexpr const char* kEveryLayer =
    "conv 4 k3 p1 s2\nbatchnorm\nrelu\nas a\nconv 4 k3 p1\nbatchnorm local\nadd a\nmaxpool 2\n"
    "dropout2d 0.5\navgpool 2\nconv 6 k1\navgpool global\nas b\nlinear 6\nrelu\nadd b\ndropout "
    "0.5\n"
    "linear classes\nlog-softmax\n";

struct Model {
    std::vector<std::string> operators;
    std::vector<std::vector<std::string>> inputs;                // of each operator
    std::vector<std::map<std::string, std::string>> attributes;  // of each, as text
    std::map<std::string, std::string> tensors;                  // raw
};

// Numbers with blanks between them, by name.
std::map<std::string, std::string> attributes_of(const std::vector<ProtoField>& node) {
    std::map<std::string, std::string> attributes;
    for (const std::string& text : texts_of(node, 5)) {
        const auto fields = read_proto(text);
        std::string& values = attributes[texts_of(fields, 1).at(0)];
        for (const ProtoField& field : fields) {
            if (field.number == 3 || field.number == 8) {
                values += (values.empty() ? "" : " ") + std::to_string(field.value);
            } else if (field.number == 2) {
                float value = 0.0f;
                std::memcpy(&value, field.bytes.data(), sizeof value);
                values = std::to_string(value);
            }
        }
    }
    return attributes;
}

// Throws Catch's failure unless each node's inputs are there before it.
Model read_model(const std::string& file) {
    const auto top = read_proto(file);
    REQUIRE(texts_of(top, 7).size() == 1);
    const auto graph = read_proto(texts_of(top, 7)[0]);
    Model model;
    std::set<std::string> known;
    for (const std::string& tensor : texts_of(graph, 5)) {
        const auto fields = read_proto(tensor);
        model.tensors[texts_of(fields, 8).at(0)] = texts_of(fields, 9).at(0);
        known.insert(texts_of(fields, 8)[0]);
    }
    known.insert(texts_of(read_proto(texts_of(graph, 11).at(0)), 1).at(0));
    for (const std::string& text : texts_of(graph, 1)) {
        const auto node = read_proto(text);
        for (const std::string& input : texts_of(node, 1)) {
            INFO(input);
            CHECK(known.count(input) == 1);
        }
        CHECK(known.insert(texts_of(node, 2).at(0)).second);
        model.operators.push_back(texts_of(node, 4).at(0));
        model.inputs.push_back(texts_of(node, 1));
        model.attributes.push_back(attributes_of(node));
    }
    CHECK(known.count(texts_of(read_proto(texts_of(graph, 12).at(0)), 1).at(0)) == 1);
    return model;
}

}  // namespace

TEST_CASE("an ONNX model has the net's operations in order and its parameters to the bit") {
    const Shape image{3, 16, 16};
    const ModelSpec spec = parse_model(kEveryLayer, "every layer");
    const auto backend = make_cpu_backend(1);
    Net net(*backend, spec, image, 5, {.train_batch = 1, .eval_batch = 1});
    net.initialise(3);
    const auto tensors = net.export_parameters();
    const Model model =
        read_model(onnx_model(build_graph(spec, image, 5, false), image, tensors, {}));
    CHECK(model.operators == std::vector<std::string>{"Conv", "BatchNormalization", "Relu", "Conv",
                                                      "BatchNormalization", "Add", "MaxPool",
                                                      "AveragePool", "Conv", "AveragePool",
                                                      "Flatten", "Gemm", "Relu", "Add", "Gemm"});
    CHECK(model.tensors.size() == tensors.size());
    for (const HostTensor& tensor : tensors) {
        INFO(tensor.name);
        const std::string& raw = model.tensors.at(tensor.name);
        REQUIRE(raw.size() == tensor.values.size() * sizeof(float));
        CHECK(std::memcmp(raw.data(), tensor.values.data(), raw.size()) == 0);
    }
    // A net that ends with planes has flat logits.
    const ModelSpec planes = parse_model("conv 5 k3\navgpool global\n", "planes");
    Net other(*backend, planes, image, 5, {.train_batch = 1, .eval_batch = 1});
    CHECK(read_model(onnx_model(build_graph(planes, image, 5, false), image,
                                other.export_parameters(), {}))
              .operators == std::vector<std::string>{"Conv", "AveragePool", "Flatten"});
}

TEST_CASE("an ONNX model's operators have the net's windows, and a sum both of its inputs") {
    const Shape image{3, 20, 16};
    const ModelSpec spec = parse_model(
        "conv 4 k5 s2 p1\nas a\nconv 4 k1 nobias\nbatchnorm\nas b\nrelu\nadd a\nadd b\n"
        "maxpool 3 s2 p1\n"
        "avgpool 3 s1\navgpool global\nlinear classes\n",
        "windows");
    const auto backend = make_cpu_backend(1);
    Net net(*backend, spec, image, 5, {.train_batch = 1, .eval_batch = 1});
    const Model model = read_model(
        onnx_model(build_graph(spec, image, 5, false), image, net.export_parameters(), {}));
    // [9, 7] after the first convolution, [5, 4] after maxpool, [3, 2] after the first avgpool.
    const std::vector<std::map<std::string, std::string>> expected = {
        {{"kernel_shape", "5 5"}, {"strides", "2 2"}, {"pads", "1 1 1 1"}},
        {{"kernel_shape", "1 1"}, {"strides", "1 1"}, {"pads", "0 0 0 0"}},
        {{"epsilon", "0.000010"}},
        {},
        {},
        {},
        {{"kernel_shape", "3 3"}, {"strides", "2 2"}, {"pads", "1 1 1 1"}},
        {{"kernel_shape", "3 3"}, {"strides", "1 1"}},
        {{"kernel_shape", "3 2"}, {"strides", "1 1"}},
        {},
        {{"transB", "1"}}};
    CHECK(model.attributes == expected);
    REQUIRE(model.operators.size() == expected.size());
    CHECK(model.inputs[0] == std::vector<std::string>{"input", "conv1.weight", "conv1.bias"});
    CHECK(model.inputs[1] == std::vector<std::string>{"conv1", "conv2.weight"});
    CHECK(model.inputs[4] == std::vector<std::string>{"relu1", "conv1"});
    CHECK(model.inputs[5] == std::vector<std::string>{"add1", "bn1"});
}

TEST_CASE("an ONNX model has the formulas of activations that are no operators of its opset") {
    const Shape image{3, 6, 6};
    const ModelSpec spec = parse_model(
        "conv 4 k3\ngelu\nsilu\nleaky_relu 0.25\nrelu6\nhardswish\nhardsigmoid\nsigmoid\n"
        "linear classes\ngelu\n",
        "mine");
    const auto backend = make_cpu_backend(1);
    Net net(*backend, spec, image, 5, {.train_batch = 1, .eval_batch = 1});
    const Model model = read_model(
        onnx_model(build_graph(spec, image, 5, false), image, net.export_parameters(), {}));
    const std::vector<std::string> gelu = {"Constant", "Constant", "Constant", "Mul",
                                           "Erf",      "Add",      "Mul",      "Mul"};
    std::vector<std::string> expected = {"Conv"};
    expected.insert(expected.end(), gelu.begin(), gelu.end());
    expected.insert(expected.end(),
                    {"Sigmoid", "Mul", "LeakyRelu", "Constant", "Constant", "Clip", "HardSigmoid",
                     "Mul", "HardSigmoid", "Sigmoid", "Flatten", "Gemm"});
    expected.insert(expected.end(), gelu.begin(), gelu.end());
    REQUIRE(model.operators == expected);
    CHECK(model.attributes[1] == std::map<std::string, std::string>{{"value_float", "0.707107"}});
    CHECK(model.attributes[11] == std::map<std::string, std::string>{{"alpha", "0.250000"}});
    CHECK(model.attributes[13] == std::map<std::string, std::string>{{"value_float", "6.000000"}});
    CHECK(model.attributes[15] ==
          std::map<std::string, std::string>{{"alpha", "0.166667"}, {"beta", "0.500000"}});
    CHECK(model.inputs[14] == std::vector<std::string>{"leaky_relu1", "clip1.zero", "clip1.six"});
    CHECK(model.inputs[16] == std::vector<std::string>{"clip1", "hardswish1.gate"});
    CHECK(model.inputs[8] == std::vector<std::string>{"conv1", "gelu1.cumulative"});
    CHECK(model.inputs[9] == std::vector<std::string>{"gelu1"});
    CHECK(model.inputs[10] == std::vector<std::string>{"gelu1", "silu1.sigmoid"});
}

TEST_CASE("an ONNX model joins values in the order of the net's channels") {
    const Shape image{3, 6, 6};
    const ModelSpec spec = parse_model(
        "conv 4 k3 g1\nas x\navgpool global\nconv 4 k1 g2\nmul x\nconcat x\nlinear classes\n",
        "mine");
    const auto backend = make_cpu_backend(1);
    Net net(*backend, spec, image, 5, {.train_batch = 1, .eval_batch = 1});
    const Model model = read_model(
        onnx_model(build_graph(spec, image, 5, false), image, net.export_parameters(), {}));
    REQUIRE(model.operators == std::vector<std::string>{"Conv", "AveragePool", "Conv", "Mul",
                                                        "Concat", "Flatten", "Gemm"});
    CHECK(model.attributes[0].count("group") == 0);
    CHECK(model.attributes[2].at("group") == "2");
    CHECK(model.attributes[4].at("axis") == "1");
    CHECK(model.inputs[3] == std::vector<std::string>{"conv2", "conv1"});
    CHECK(model.inputs[4] == std::vector<std::string>{"conv1", "mul1"});
}

TEST_CASE(
    "gyre import names a Python that is missing or lacks a package, and what it cannot read") {
    const TempDir dir;
    const std::string words = "import " + dir.file("net.onnx") + " --output " + dir.file("net");
    REQUIRE(setenv("PYTHON", dir.file("no-python").c_str(), 1) == 0);
    const Outcome without = run_gyre(0, words + " --mean 0.5 --std 0.25");
    REQUIRE(unsetenv("PYTHON") == 0);
    INFO(without.output);
    CHECK(without.exit_code == 3);
    CHECK(count_of(without.output, "no-python' does not start: No such file") == 1);
    CHECK(count_of(without.output, "python3-onnx") == 1);
    const Outcome missing = run_gyre(0, words);
    INFO(missing.output);
    CHECK(missing.exit_code == 3);
    CHECK(count_of(missing.output, "net.onnx: it could not be imported, as it says above") == 1);
    CHECK(count_of(missing.output, "has no package onnx") +
              count_of(missing.output, "No such file or directory") ==
          1);
    CHECK(!fs::exists(dir.file("net")));
}

TEST_CASE("gyre export refuses what it cannot read or write") {
    const TempDir dir;
    const Outcome missing =
        run_gyre(0, "export --weights " + dir.file("none") + " --onnx " + dir.file("net.onnx"));
    CHECK(missing.exit_code == 3);
    CHECK(count_of(missing.output, dir.file("none")) == 1);
    make_dataset(dir.file("set"), 20, 10, 1, 28, 28, 3);
    REQUIRE(run_gyre(0, "train --threads 1 --epochs 1 --batch-size 10 --data " + dir.file("set") +
                            " --save " + dir.file("run"))
                .exit_code == 0);
    const std::string weights = "export --weights " + dir.file("run/best.safetensors") + " --onnx ";
    const Outcome nowhere = run_gyre(0, weights + dir.file("no/net.onnx"));
    INFO(nowhere.output);
    CHECK(nowhere.exit_code == 3);
    CHECK(count_of(nowhere.output, "the ONNX model could not be written") == 1);
    // A file that is not regular stays, and a link stays a link.
    REQUIRE(mkfifo(dir.file("pipe").c_str(), 0600) == 0);
    fs::create_symlink("pipe", dir.file("to-pipe"));
    for (const char* name : {"pipe", "to-pipe"}) {
        const Outcome pipe = run_gyre(0, weights + dir.file(name));
        INFO(pipe.output);
        CHECK(pipe.exit_code == 3);
        CHECK(count_of(pipe.output, dir.file(name) + ": the ONNX model cannot go there") == 1);
        CHECK(fs::is_fifo(dir.file(name)));
    }
    fs::create_symlink("aim.onnx", dir.file("link.onnx"));
    for (int times = 0; times < 2; ++times) {  // to no file yet, and to one that is there
        REQUIRE(run_gyre(0, weights + dir.file("link.onnx")).exit_code == 0);
        CHECK(fs::is_symlink(dir.file("link.onnx")));
        CHECK(fs::is_regular_file(fs::symlink_status(dir.file("aim.onnx"))));
    }
    const Outcome good = run_gyre(0, weights + dir.file("net.onnx"));
    INFO(good.output);
    REQUIRE(good.exit_code == 0);
    CHECK(read_model(file_bytes(dir.file("net.onnx"))).operators.size() == 10);  // with a Flatten
}
