// Weights on disk: safetensors files, PyTorch's files and names, and what does not fit a net.
#include <fmt/format.h>

#include <cstring>
#include <fstream>
#include <string>
#include <vector>

#include "base/error.hpp"
#include "kernels/make_backend.hpp"
#include "model/net.hpp"
#include "model/spec.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/expect_error.hpp"
#include "tests/support/temp_dir.hpp"

using namespace gyre;
using namespace gyre::model;
using gyre::test::expect_error;
using gyre::test::TempDir;

namespace {

void write_file(const std::filesystem::path& path, const std::string& bytes) {
    std::ofstream(path, std::ios::binary) << bytes;
}

std::string safetensors_bytes(const std::string& header, const std::string& data) {
    std::uint64_t size = header.size();
    std::string bytes(sizeof size, '\0');
    std::memcpy(bytes.data(), &size, sizeof size);
    return bytes + header + data;
}

using Names = std::vector<std::string>;

// Renames the layers of a model's weights, and takes them back by way of a file, which does
// not keep the order and lacks a layer whose name is empty: the remarks, or the refusal's text.
std::string import_as(const std::string& text, const Names& layers,
                      const std::string& prefix = "") {
    const auto backend = make_cpu_backend(1);
    const TempDir dir;
    const ModelSpec model = text == "net" ? load_model(text) : parse_model(text, "mine");
    const Shape shape = text == "net" ? Shape{1, 28, 28} : Shape{1, 2, 3};
    Net net(*backend, model, shape, 10, {1, 1});
    net.initialise(1);
    const auto original = net.export_parameters();
    TensorFile file{original, {}};
    for (std::size_t i = 0; i < file.tensors.size(); ++i) {
        std::string& name = file.tensors[i].name;
        name = prefix + (layers.empty() ? name : layers.at(i / 2) + name.substr(name.find('.')));
    }
    std::erase_if(file.tensors,
                  [](const HostTensor& tensor) { return tensor.name.starts_with("."); });
    write_safetensors(dir.path() / "w", file);
    net.initialise(2);
    std::string remarks;
    for (const std::string& remark :
         net.import_parameters(read_safetensors(dir.path() / "w").tensors, "w")) {
        remarks += remark + "\n";
    }
    const auto imported = net.export_parameters();
    for (std::size_t i = 0; i < original.size(); ++i) {
        INFO(original[i].name);
        CHECK(imported[i].values == original[i].values);
    }
    return remarks;
}

void expect_remarks(const std::string& text, const Names& layers, const std::string& prefix,
                    std::initializer_list<std::string> parts) {
    const std::string remarks = import_as(text, layers, prefix);
    INFO(remarks);
    for (const std::string& part : parts) {
        CHECK(remarks.find(part) != std::string::npos);
    }
}

void refuse_names(const std::string& text, const Names& layers,
                  std::initializer_list<std::string> parts) {
    expect_error(ExitCode::bad_input, parts, [&] { import_as(text, layers); });
    // Both sides are listed.
    expect_error(ExitCode::bad_input,
                 {layers.back() + ".bias [10]", text == "net" ? "fc2.bias [10]" : "fc"},
                 [&] { import_as(text, layers); });
}

}  // namespace

TEST_CASE("weights go to disk and back, and only whole files count") {
    const TempDir dir;
    const auto backend = make_cpu_backend(1);
    Net net(*backend, load_model("net"), {1, 28, 28}, 10, {1, 1});
    net.initialise(1);
    const auto path = dir.path() / "w.safetensors";
    write_safetensors(path, {net.export_parameters(), {{"gyre.model", "text\n"}}});
    const TensorFile file = read_safetensors(path);
    CHECK(file.metadata.at("gyre.model") == "text\n");
    CHECK(file.metadata.at("format") == "pt");
    Net other(*backend, load_model("net"), {1, 28, 28}, 10, {1, 1});
    other.import_parameters(file.tensors, path.string());
    const auto a = net.export_parameters(), b = other.export_parameters();
    for (std::size_t i = 0; i < a.size(); ++i) {
        CHECK(a[i].name == b[i].name);
        CHECK(a[i].values == b[i].values);
    }
    // Nothing but the file itself is left behind, and a failed write leaves it alone.
    std::size_t entries = 0;
    for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator(dir.path())) {
        ++entries;
    }
    CHECK(entries == 1);
    expect_error(ExitCode::bad_input, {"could not be written", "No such file"},
                 [&] { write_safetensors(dir.path() / "no" / "w", file); });

    Net wrong(*backend, parse_model("linear 3\nlinear classes\n", "mine"), {1, 4, 4}, 10, {});
    expect_error(ExitCode::bad_input, {"no parameter 'conv"},
                 [&] { wrong.import_parameters(file.tensors, "w"); });
    Net larger(*backend, load_model("net"), {1, 32, 32}, 10, {1, 1});
    expect_error(ExitCode::bad_input, {"fc1.weight", "[50, 320]", "[50, 500]"},
                 [&] { larger.import_parameters(file.tensors, "w"); });
    auto fewer = file.tensors;
    fewer.erase(fewer.begin());
    expect_error(ExitCode::bad_input, {"is missing"}, [&] { net.import_parameters(fewer, "w"); });
}

TEST_CASE("safetensors: every malformed file is refused with its offset") {
    const TempDir dir;
    const auto path = dir.path() / "w";
    const auto refuse = [&](const std::string& bytes, std::initializer_list<std::string> parts) {
        write_file(path, bytes);
        expect_error(ExitCode::bad_input, parts, [&] { read_safetensors(path); });
    };
    expect_error(ExitCode::bad_input, {"none", "cannot be read"},
                 [&] { read_safetensors(dir.path() / "none"); });
    refuse("", {"0 bytes"});
    refuse("1234567", {"7 bytes"});
    refuse(std::string("\xff\xff\xff\xff\xff\xff\xff\x7f", 8), {"offset 0"});
    refuse(safetensors_bytes("{", ""), {"offset 8", "JSON"});
    refuse(safetensors_bytes("[1]", ""), {"JSON"});
    refuse(safetensors_bytes("null", ""), {"not a JSON object"});
    const std::string good = R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})";
    write_file(path, safetensors_bytes(good, "12345678"));
    CHECK(read_safetensors(path).tensors.at(0).values.size() == 2);
    refuse(safetensors_bytes(good, "12345678x"), {"8 bytes", "9 bytes", "something was added"});
    refuse(safetensors_bytes("{}", "x"), {"0 bytes", "1 bytes"});
    for (const char* second : {"[12,16]", "[4,8]"}) {  // a hole, and an overlap
        refuse(safetensors_bytes(good.substr(0, good.size() - 1) +
                                     R"(,"b":{"dtype":"F32","shape":[1],"data_offsets":)" + second +
                                     "}}",
                                 "1234567890123456"),
               {"offset 8", second});
    }
    refuse(safetensors_bytes(good, "1234567"), {"'a'", "7 bytes of data"});
    refuse(safetensors_bytes(R"({"a":{"dtype":"I16","shape":[2],"data_offsets":[0,4]}})", "1234"),
           {"'a'", "I16", "F32, F16, BF16 or F64"});
    refuse(safetensors_bytes(R"({"a":{"dtype":"F16","shape":[2],"data_offsets":[0,8]}})", "1234"),
           {"'a' of 4 bytes", "[0,8]"});
    refuse(safetensors_bytes(R"({"a\u001b":{"dtype":"F16","shape":[0],"data_offsets":[0,0]}})", ""),
           {"control characters"});
    refuse(safetensors_bytes(R"({"a":{"dtype":"F32","shape":[2]}})", "12345678"), {"data_offsets"});
    refuse(
        safetensors_bytes(R"({"a":{"dtype":"F32","shape":[-2],"data_offsets":[0,8]}})", "12345678"),
        {"impossible shape"});
    refuse(safetensors_bytes(
               R"({"a":{"dtype":"F32","shape":[4611686018427387904,4],"data_offsets":[0,0]}})", ""),
           {"impossible shape"});
    refuse(
        safetensors_bytes(R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[8,0]}})", "12345678"),
        {"data_offsets [8,0]"});
    // Numbers whose conversion by JSON's own rules would be undefined or another number.
    for (const char* number : {"24e64", "-1", "1e300", "7.5", "18446744073709551616"}) {
        refuse(safetensors_bytes(
                   fmt::format(R"({{"a":{{"dtype":"F32","shape":[2],"data_offsets":[0,{}]}}}})",
                               number),
                   "12345678"),
               {"offset 8", "instead of an integer from 0 on of at most 64 bits"});
    }
    for (const char* extent : {"1e300", "2.5", "9223372036854775808"}) {
        refuse(safetensors_bytes(
                   fmt::format(R"({{"a":{{"dtype":"F32","shape":[{}],"data_offsets":[0,8]}}}})",
                               extent),
                   "12345678"),
               {"offset 8", "instead of an integer of at most 64 bits"});
    }
}

TEST_CASE("safetensors: narrower and wider floats are converted") {
    const TempDir dir;
    const auto path = dir.path() / "w";
    const auto values_of = [&](const std::string& dtype, const auto& stored) {
        const std::string data(reinterpret_cast<const char*>(stored.data()),
                               stored.size() * sizeof stored[0]);
        const auto n = std::to_string(stored.size()), bytes = std::to_string(data.size());
        write_file(path,
                   safetensors_bytes(R"({"fc1.weight":{"dtype":")" + dtype + R"(","shape":[)" + n +
                                         R"(],"data_offsets":[0,)" + bytes + "]}}",
                                     data));
        const HostTensor tensor = read_safetensors(path).tensors.at(0);
        CHECK(tensor.dtype == dtype);
        return tensor.values;
    };
    using Halves = std::vector<std::uint16_t>;
    using Doubles = std::vector<double>;
    // 1, -2.5, the smallest and the largest.
    CHECK(values_of("F16", Halves{0x3c00, 0xc100, 0x0001, 0x7bff}) ==
          std::vector<float>{1.0f, -2.5f, 0x1p-24f, 65504.0f});
    CHECK(values_of("BF16", Halves{0x3f80, 0xc020, 0x0001}) ==
          std::vector<float>{1.0f, -2.5f, 0x1p-133f});
    CHECK(values_of("F64", Doubles{1.0 / 3, -2.5, 1e-300}) ==
          std::vector<float>{1.0f / 3, -2.5f, 0.0f});
    expect_error(ExitCode::bad_input, {"'fc1.weight'", "1e+300", "more than F32 holds"}, [&] {
        values_of("F64", Doubles{0.0, 1e300});
    });
}

TEST_CASE("a weights file of a net with batch normalisation brings its running statistics") {
    const auto backend = make_cpu_backend(1);
    const ModelSpec model = parse_model("conv 2 k3\nbatchnorm\nlinear classes\n", "mine");
    const NetOptions options{.train_batch = 1, .eval_batch = 1};
    Net first(*backend, model, {1, 4, 4}, 3, options),
        second(*backend, model, {1, 4, 4}, 3, options);
    first.initialise(1);
    second.initialise(2);
    std::vector<HostTensor> tensors = first.export_parameters();
    CHECK(tensors.size() == 8);
    CHECK(tensors[6].name == "bn1.running_mean");
    tensors[6].values = {3.0f, 4.0f};
    const TempDir dir;
    const auto path = dir.path() / "bn.safetensors";
    write_safetensors(path, {tensors, {}});
    second.import_parameters(read_safetensors(path).tensors, "bn");
    CHECK(second.export_parameters()[6].values == tensors[6].values);
    CHECK(second.export_parameters()[7].values == std::vector<float>{1.0f, 1.0f});

    // PyTorch's state_dict has a count beside them, which is left out.
    const std::string header =
        "{\"bn1.num_batches_tracked\":{\"dtype\":\"I64\",\"shape\":[],\"data_offsets\":[0,8]}}";
    write_file(path, safetensors_bytes(header, std::string(8, 'x')));
    CHECK(read_safetensors(path).tensors.empty());
}

TEST_CASE("files that torch.save wrote are answered with the Python that converts them") {
    const TempDir dir;
    const auto path = dir.path() / "mnist \"cnn\".pt";
    const auto refuse = [&](const std::string& bytes, const std::string& load) {
        write_file(path, bytes);
        expect_error(ExitCode::bad_input,
                     {"cnn\".pt: this is a ", "\n  import " + load.substr(0, load.find('.')) + ", ",
                      load, "mnist \\\"cnn\\\".pt\"", "cnn\\\".safetensors\")"},
                     [&] { read_safetensors(path); });
    };
    refuse(std::string("PK\x03\x04\0\0\x08\x08\0\0\0\0", 12), "torch.load(\"");
    refuse(std::string("\x80\x02\x8a\nl\xfc\x9c\x46\xf9 j\xa8P\x19.", 15),  // before PyTorch 1.6
           "torch.load(\"");
    refuse(std::string("\x80\x04\x95\x2a\0\0\0\0\0\0\0}", 12), "pickle.load(open(\"");
    refuse(std::string("\x80\x02]"), "pickle.load(open(\"");
    // The length of a header may begin like a pickle: 0x280 bytes.
    std::string header = R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}})";
    header.resize(0x280, ' ');
    write_file(path, safetensors_bytes(header, "1234"));
    CHECK(read_safetensors(path).tensors.size() == 1);
}

TEST_CASE("finetune takes the layers that fit, and names those that are initialised") {
    const auto backend = make_cpu_backend(1);
    Net whole(*backend, load_model("net"), {1, 28, 28}, 10, {1, 1});
    whole.initialise(1);
    const auto given = whole.export_parameters();
    struct Case {
        const char* description;
        Names layers;  // in the file, of the net's four
        std::string unused;
    };
    for (const Case& c : {Case{"the net's names", {"conv1", "conv2", "fc1", "fc2"}, "fc2"},
                          Case{"another head", {"conv1", "conv2", "fc1", "head"}, "head"},
                          Case{"a Sequential", {"0", "3", "7", "9"}, "9"},
                          Case{"no head", {"conv1", "conv2", "fc1", ""}, ""}}) {
        INFO(c.description);
        auto file = given;
        for (std::size_t i = 0; i < file.size(); ++i) {
            file[i].name = c.layers[i / 2] + file[i].name.substr(file[i].name.find('.'));
        }
        std::erase_if(file, [](const HostTensor& t) { return t.name.starts_with("."); });
        Net five(*backend, load_model("net"), {1, 28, 28}, 5, {1, 1});
        five.initialise(2);
        const auto drawn = five.export_parameters();
        expect_error(ExitCode::bad_input, {"fc2"}, [&] { five.import_parameters(file, "w"); });
        const auto remarks = five.import_parameters(file, "w", true);
        CHECK(remarks.back() ==
              "these are initialised: fc2.weight [5, 50], fc2.bias [5]; unused in the file: " +
                  (c.unused.empty() ? "nothing"
                                    : c.unused + ".weight [10, 50], " + c.unused + ".bias [10]"));
        const auto taken = five.export_parameters();
        for (std::size_t i = 0; i < taken.size(); ++i) {
            INFO(taken[i].name);
            CHECK(taken[i].values == (i < 6 ? given[i] : drawn[i]).values);
        }
    }
    // A layer is taken as a whole: of this one only the bias has another shape.
    auto file = given;
    file[1].shape = {2, 5};
    CHECK(whole.import_parameters(file, "w", true).back() ==
          "these are initialised: conv1.weight [10, 1, 5, 5], conv1.bias [10]; "
          "unused in the file: conv1.weight [10, 1, 5, 5], conv1.bias [2, 5]");
    Net other(*backend, parse_model("linear 3\nlinear classes\n", "mine"), {1, 4, 4}, 10, {});
    expect_error(ExitCode::bad_input, {"nothing in the file fits the net", "fc1.bias [3]"},
                 [&] { other.import_parameters(given, "w", true); });
    // Which of the file's two layers the net's one is cannot be known.
    Net same(*backend, parse_model("linear 10\nlinear classes\n", "mine"), {1, 2, 5}, 10, {});
    auto layers = same.export_parameters();
    for (HostTensor& tensor : layers) {
        tensor.name = "0." + tensor.name;
    }
    Net once(*backend, parse_model("linear 7\nlinear 10\nlinear classes\n", "mine"), {1, 2, 5}, 10,
             {});
    expect_error(ExitCode::bad_input, {"the net has 1 layers with the shapes of fc3, the file 2"},
                 [&] { once.import_parameters(layers, "w", true); });
}

TEST_CASE("weights named by PyTorch's wrappers and containers are matched, or refused") {
    CHECK(import_as("net", {}) == "");
    expect_remarks("net", {}, "module.", {"prefix 'module.'"});
    expect_remarks("net", {}, "_orig_mod.module.", {"prefix '_orig_mod.module.'"});
    // One nn.Sequential; its tenth module comes after its second; equal shapes.
    const std::string deep =
        "linear 6\nrelu\nlinear 6\nrelu\nlinear 6\nrelu\nlinear 6\nrelu\nlinear 6\nrelu\n"
        "linear 6\nrelu\nlinear classes\n";
    const Names numbers = {"0", "2", "4", "6", "8", "10", "12"};
    expect_remarks(deep, numbers, "",
                   {"by order and shape '0' as fc1, '2' as fc2", "'10' as fc6, '12' as fc7"});
    expect_remarks(deep, numbers, "module.model.", {"prefix 'module.'", "'model.10' as fc6"});
    expect_remarks(deep, {"0.0", "0.3", "1.0", "1.3", "2", "10.1", "10.10"}, "", {"'10.1' as fc6"});
    // Several: their shapes tell which is where. So they do with any names.
    expect_remarks("net", {"features.0", "features.3", "classifier.1", "classifier.4"}, "",
                   {"'features.3' as conv2, 'classifier.1' as fc1"});
    expect_remarks("net", {"first", "second", "hidden", "out"}, "", {"'hidden' as fc1"});
    expect_remarks("linear classes\n", {"0"}, "", {"'0' as fc1"});
    // Names that agree are kept, whatever the others are.
    expect_remarks("net", {"conv1", "conv2", "lin1", "fc"}, "",
                   {"some layers' names", "by order and shape 'lin1' as fc1, 'fc' as fc2"});
    expect_remarks("linear 6\nlinear 6\nlinear classes\n", {"0", "fc2", "fc3"}, "",
                   {"by order and shape '0' as fc1"});

    const std::string same = "linear 6\nlinear 6\nlinear classes\n";
    refuse_names(same, {"a.0", "b.0", "c.0"}, {"'a.0'", "'b.0'", "do not tell which"});
    refuse_names(same, {"0", "first", "c"}, {"do not tell which"});
    refuse_names("linear 6\n" + same, {"fc1", "b", "c", "d"}, {"do not tell which"});
    refuse_names("net", {"conv1", "conv2", "", "lin2"},
                 {"the net has 2 other layers with parameters, the file 1"});
    refuse_names("net", {"0", "1", "", "2"}, {"the net has 4 layers with parameters, the file 3"});
    refuse_names("linear 6\nlinear 5\nlinear classes\n", {"0", "2", "1"},
                 {"'2' is fc2", "'1' is fc3", "against their order"});

    const auto backend = make_cpu_backend(1);
    Net net(*backend, load_model("net"), {1, 28, 28}, 10, {1, 1});
    auto tensors = net.export_parameters();
    tensors[0].dtype = "F16";
    CHECK(net.import_parameters(tensors, "w") ==
          std::vector<std::string>{"F16 tensors are converted to F32"});
    for (HostTensor& tensor : tensors) {
        tensor.name = std::string("x").append(tensor.name);
    }
    Net larger(*backend, load_model("net"), {1, 32, 32}, 10, {1, 1});
    expect_error(ExitCode::bad_input,
                 {"nothing in the file has the shapes of fc1", "xfc1.weight [50, 320]",
                  "fc1.weight [50, 500]"},
                 [&] { larger.import_parameters(tensors, "w"); });
    tensors.pop_back();
    expect_error(ExitCode::bad_input, {"'xfc2' has the shapes of fc2, but no bias"},
                 [&] { net.import_parameters(tensors, "w"); });
    expect_error(ExitCode::bad_input, {"the file has nothing"},
                 [&] { net.import_parameters({}, "w"); });
}
