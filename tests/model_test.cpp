// Model files, shapes, parameters, weights on disk, and the gradient of a whole net.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <fstream>
#include <numeric>

#include "kernels/base/error.hpp"
#include "kernels/emulation/emulator.hpp"
#include "model/net.hpp"
#include "model/spec.hpp"
#include "tests/catch.hpp"
#include "tests/expect_error.hpp"
#include "tests/temp_dir.hpp"

using namespace gyre;
using namespace gyre::model;
using gyre::test::expect_error;
using gyre::test::TempDir;

namespace {

void expect_bad_model(const std::string& text, std::initializer_list<std::string> parts) {
    INFO(text);
    expect_error(ExitCode::bad_input, parts, [&] { parse_model(text, "mine"); });
}

void expect_misfit(const std::string& text, const Shape& input, int classes,
                   std::initializer_list<std::string> parts) {
    INFO(text);
    const auto backend = make_cpu_backend(1);
    expect_error(ExitCode::bad_input, parts,
                 [&] { Net(*backend, parse_model(text, "mine"), input, classes, {}); });
}

std::vector<std::string> names_of(const Net& net) {
    std::vector<std::string> names;
    for (const Parameter& parameter : net.parameters()) {
        names.push_back(parameter.name);
    }
    return names;
}

void write_file(const std::filesystem::path& path, const std::string& bytes) {
    std::ofstream(path, std::ios::binary) << bytes;
}

std::string safetensors_bytes(const std::string& header, const std::string& data) {
    std::uint64_t size = header.size();
    std::string bytes(sizeof size, '\0');
    std::memcpy(bytes.data(), &size, sizeof size);
    return bytes + header + data;
}

}  // namespace

TEST_CASE("the built-in nets have the parameters they are known for") {
    const auto backend = make_cpu_backend(1);
    const Net net(*backend, load_model("net"), {1, 28, 28}, 10, {});
    CHECK(net.parameter_count() == 21840);
    CHECK(names_of(net) == std::vector<std::string>{"conv1.weight", "conv1.bias", "conv2.weight",
                                                    "conv2.bias", "fc1.weight", "fc1.bias",
                                                    "fc2.weight", "fc2.bias"});
    CHECK(net.parameters()[0].shape == std::vector<std::int64_t>{10, 1, 5, 5});
    CHECK(net.parameters()[4].shape == std::vector<std::int64_t>{50, 320});
    const Net wide(*backend, load_model("wide"), {1, 28, 28}, 10, {4, 4, true});
    CHECK(wide.parameter_count() == 25775882);
}

TEST_CASE("nets take their input and classes from the data") {
    const auto backend = make_cpu_backend(1);
    const Net small(*backend, load_model("net"), {3, 20, 33}, 63, {4, 4, true});
    CHECK(small.parameters()[0].shape == std::vector<std::int64_t>{10, 3, 5, 5});
    CHECK(small.parameters().back().shape == std::vector<std::int64_t>{63});
}

TEST_CASE("model files: comments, options and defaults") {
    const ModelSpec model = parse_model(
        "# a comment\n\n  conv 8 k3 s2 p1   # first\nmaxpool 3 s2\r\nmaxpool 2\nlinear classes\n",
        "mine");
    REQUIRE(model.layers.size() == 4);
    CHECK(model.layers[0].stride == 2);
    CHECK(model.layers[0].padding == 1);
    CHECK(model.layers[0].line == 3);
    CHECK(model.layers[1].stride == 2);
    CHECK(model.layers[2].stride == 2);
    CHECK(model.layers[3].out == 0);
}

TEST_CASE("model files: every mistake is named with its line") {
    expect_bad_model("", {"mine", "no layers"});
    expect_bad_model("relu\nconvolution 3\n", {"line 2", "convolution", "conv OUT kK"});
    expect_bad_model("conv\n", {"line 1", "missing", "conv OUT kK"});
    expect_bad_model("conv 8\n", {"line 1", "kK is missing"});
    expect_bad_model("conv 8 k0\n", {"'k0'"});
    expect_bad_model("conv 8 k3 s0\n", {"'s0'"});
    expect_bad_model("conv 8 k3 p-1\n", {"'p-1'"});
    expect_bad_model("conv 8 k3 k5\n", {"'k5' was not expected"});
    expect_bad_model("conv 8 k3 q1\n", {"'q1' was not expected"});
    expect_bad_model("conv 0 k3\n", {"'0'"});
    expect_bad_model("conv 99999999999 k3\n", {"'99999999999'"});
    expect_bad_model("conv 8.5 k3\n", {"'8.5'"});
    expect_bad_model("dropout\n", {"probability is missing"});
    expect_bad_model("dropout 1.5\n", {"1.5", "between 0 and 1"});
    expect_bad_model("dropout nan\n", {"between 0 and 1"});
    expect_bad_model("linear many\n", {"'many'"});
    expect_bad_model("relu 3\n", {"'3' was not expected"});
    expect_bad_model("log-softmax\nlinear 3\n", {"line 2", "nothing may follow"});
    expect_error(ExitCode::bad_input, {"no/such/model", "net, wide, resnet", "`model`"},
                 [] { load_model("no/such/model"); });
}

TEST_CASE("nets that do not fit name the layer and the shapes") {
    expect_misfit("conv 8 k9\nlinear classes\n", {1, 8, 8}, 10, {"line 1", "9 x 9", "[1, 8, 8]"});
    expect_misfit("maxpool 4\nmaxpool 4\nlinear classes\n", {3, 8, 9}, 10,
                  {"line 2", "4 x 4", "[3, 2, 2]", "[3, 8, 9]"});
    expect_misfit("linear 8\nconv 3 k1\nlinear classes\n", {1, 8, 8}, 10,
                  {"line 2", "flat", "[8]"});
    expect_misfit("linear 8\ndropout2d 0.5\n", {1, 8, 8}, 8, {"line 2", "flat"});
    expect_misfit("linear 8\n", {1, 8, 8}, 10, {"[8]", "10 classes", "linear classes"});
    expect_misfit("relu\n", {10, 1, 1}, 10, {"nothing to learn"});
    expect_misfit("maxpool 16\nlinear classes\n", {1, 32, 32}, 10, {"15 x 15"});
}

TEST_CASE("initial weights are uniform within PyTorch's bounds and follow the seed") {
    const auto backend = make_cpu_backend(1);
    Net net(*backend, load_model("net"), {1, 28, 28}, 10, {1, 1, true});
    net.initialise(1);
    const auto first = net.export_parameters();
    for (std::size_t i = 0; i < first.size(); ++i) {
        INFO(first[i].name);
        const double bound = 1.0 / std::sqrt(static_cast<double>(net.parameters()[i].fan_in));
        double largest = 0.0, sum = 0.0, squares = 0.0;
        for (const float v : first[i].values) {
            largest = std::max(largest, std::abs(double{v}));
            sum += double{v};
            squares += double{v} * double{v};
        }
        const auto n = static_cast<double>(first[i].values.size());
        CHECK(largest <= bound);
        CHECK(largest > 0.5 * bound);
        if (n > 200) {  // mean 0, variance bound^2 / 3; five standard deviations
            CHECK(std::abs(sum / n) < 5 * bound / std::sqrt(3 * n));
            CHECK(std::abs(squares / n / (bound * bound) - 1.0 / 3) < 5 * 0.3 / std::sqrt(n));
        }
    }
    CHECK(net.parameters()[0].fan_in == 25);
    CHECK(net.parameters()[5].fan_in == 320);  // a bias has its weight's
    net.initialise(2);
    CHECK(net.export_parameters()[0].values != first[0].values);
    net.initialise(1);
    CHECK(net.export_parameters()[0].values == first[0].values);
}

TEST_CASE("Kaiming's weights have variance 2 / fan_in, and biases of 0") {
    const auto backend = make_cpu_backend(1);
    for (const WeightInit init : {WeightInit::kaiming_normal, WeightInit::kaiming_uniform}) {
        Net net(*backend, parse_model("linear 100\nbatchnorm\nlinear classes\n", "mine"),
                {1, 20, 20}, 10, {.train_batch = 1, .eval_batch = 1, .init = init});
        net.initialise(3);
        const std::vector<HostTensor> tensors = net.export_parameters();
        const std::vector<float>& weights = tensors[0].values;
        REQUIRE(weights.size() == 40000);
        double sum = 0.0, squares = 0.0, largest = 0.0;
        for (const float w : weights) {
            sum += double{w};
            squares += double{w} * double{w};
            largest = std::max(largest, std::abs(double{w}));
        }
        // Five standard errors of a mean of 40,000 and of their variance.
        const double deviation = std::sqrt(2.0 / 400.0);
        CHECK(std::abs(sum / 40000) < 5 * deviation / 200);
        CHECK(squares / 40000 == Approx(2.0 / 400.0).epsilon(5 * std::sqrt(2.0) / 200));
        const bool normal = init == WeightInit::kaiming_normal;
        CHECK((largest > std::sqrt(6.0 / 400.0)) == normal);
        for (const std::size_t zeros : {1, 3, 5}) {  // the biases
            for (const float b : tensors[zeros].values) {
                CHECK(b == 0.0f);
            }
        }
        for (const float w : tensors[2].values) {
            CHECK(w == 1.0f);
        }
    }
}

TEST_CASE("no two initial weights come from the same random number") {
    const auto backend = make_cpu_backend(1);
    Net net(*backend, parse_model("linear 8\nlinear 8\nlinear classes\n", "mine"), {1, 2, 4}, 8,
            {1, 1, true});
    net.initialise(1);
    std::vector<float> all;  // of one range, as every layer has 8 inputs
    for (const HostTensor& tensor : net.export_parameters()) {
        all.insert(all.end(), tensor.values.begin(), tensor.values.end());
    }
    REQUIRE(all.size() == 3 * (64 + 8));
    std::sort(all.begin(), all.end());
    CHECK(std::adjacent_find(all.begin(), all.end()) == all.end());
}

TEST_CASE("dropout layers draw masks of their own; dropout2d drops whole channels") {
    const auto backend = make_cpu_backend(1);
    // Of one image the gradient of a linear layer's weights is zero where its input was dropped.
    const auto dropped = [&](const std::string& text, std::size_t parameter) {
        const Shape shape{1, 4, 8};
        Net net(*backend, parse_model(text, "mine"), shape, 3, {1, 0, true});
        net.initialise(4);
        const std::vector<float> x(static_cast<std::size_t>(shape.elems()), 1.0f);
        backend->import_activation(shape, 1, x.data(), net.input());
        net.labels()[0] = 1;
        const std::int32_t sample = 5;
        const std::uint32_t epoch = 1;
        Batch pass;
        pass.n = 1;
        pass.samples = &sample;
        pass.seed = 2;
        pass.epoch = &epoch;
        pass.training = true;
        net.forward(pass);
        net.loss(pass, 1.0f, net.gradient_data() + net.tail_offset());
        net.backward(pass, [](std::int64_t) {});
        const Parameter& weight = net.parameters().at(parameter);
        // Any output will do; not all have a gradient.
        std::vector<bool> zero(static_cast<std::size_t>(weight.fan_in), true);
        for (std::int64_t i = 0; i < weight.elems; ++i) {
            if (net.gradient_data()[weight.offset_elems + i] != 0.0f) {
                zero[static_cast<std::size_t>(i % weight.fan_in)] = false;
            }
        }
        return zero;
    };
    const std::string twice = "linear 64\ndropout 0.5\nlinear 64\ndropout 0.5\nlinear classes\n";
    const auto first = dropped(twice, 2), second = dropped(twice, 4);
    for (const auto& mask : {first, second}) {
        const auto count = std::count(mask.begin(), mask.end(), true);
        CHECK(count > 16);
        CHECK(count < 48);
    }
    CHECK(first != second);
    for (const bool by_channel : {false, true}) {
        const auto mask = dropped(std::string("conv 16 k1\ndropout") + (by_channel ? "2d" : "") +
                                      " 0.5\nlinear classes\n",
                                  2);
        REQUIRE(mask.size() == 16 * 32);
        std::ptrdiff_t whole = 0, half = 0;
        for (auto channel = mask.begin(); channel != mask.end(); channel += 32) {
            const auto count = std::count(channel, channel + 32, true);
            (count == 0 || count == 32 ? whole : half) += 1;
        }
        CHECK((by_channel ? half : whole) == 0);
        CHECK(std::count(mask.begin(), mask.end(), true) > 100);
        CHECK(std::count(mask.begin(), mask.end(), true) < 412);
    }
}

TEST_CASE("the gradient of a whole net is the slope of its loss") {
    const auto backend = make_cpu_backend(1);
    for (const char* text :
         {"conv 4 k3 p1\nrelu\ndropout2d 0.3\nmaxpool 2\nconv 5 k3 s2\nrelu\nlinear 12\nrelu\n"
          "dropout 0.5\nlinear classes\n",
          "linear 9\nrelu\nlinear classes\n", "conv 3 k2\nmaxpool 3 s2\nlinear classes\n",
          "conv 4 k3\nbatchnorm\nrelu\navgpool 2\nconv 6 k3\nbatchnorm\navgpool global\nlinear "
          "classes\n",
          "relu\nlinear 9\nas x\nrelu\nadd x\nadd x\nas y\nlinear 9\nadd y\nrelu\nlinear classes\n",
          "conv 4 k3 p1\nas x\nrelu\nas r\nconv 6 k3 s2 p1\nrelu\nconv 6 k3 p1\nas y\nfrom x\n"
          "conv 6 k1 s2\nadd y\nrelu\ndropout 0.2\nas z\nconv 6 k3 p1\nadd z\nas v\nfrom r\n"
          "conv 6 k3 s2 p1\nadd v\nlinear classes\n"}) {
        INFO(text);
        const int n = 20;
        const Shape shape{2, 9, 11};
        Net net(*backend, parse_model(text, "mine"), shape, 5, {n, 0, true});
        net.initialise(3);
        std::vector<float> x(static_cast<std::size_t>(n * shape.elems()));
        for (std::size_t i = 0; i < x.size(); ++i) {
            x[i] = std::sin(static_cast<float>(i * i % 1009));
        }
        std::vector<std::int32_t> samples(n);
        std::iota(samples.begin(), samples.end(), 100);
        const std::uint32_t epoch = 2;
        Batch pass;
        pass.n = n;
        pass.samples = samples.data();
        pass.seed = 5;
        pass.epoch = &epoch;
        pass.training = true;
        DeviceBuffer<float> sums(*backend, 2);
        const auto loss = [&] {
            backend->import_activation(shape, n, x.data(), net.input());
            for (int i = 0; i < n; ++i) {
                net.labels()[i] = i % 5;
            }
            net.forward(pass);
            net.loss(pass, 1.0f, sums.get());
            return double{sums.get()[0]};
        };
        loss();
        std::vector<std::int64_t> order;
        net.backward(pass, [&](std::int64_t offset) { order.push_back(offset); });
        // Layers are final from the last to the first, each once.
        const std::vector<std::int64_t> expected(net.layer_begins().rbegin(),
                                                 net.layer_begins().rend());
        CHECK(order == expected);

        // Along the gradient itself, scaled to length 1, the slope is the gradient's norm.
        const auto elems = static_cast<std::size_t>(net.flat_elems());
        std::vector<float> direction(net.gradient_data(), net.gradient_data() + elems);
        const double norm = std::sqrt(
            std::inner_product(direction.begin(), direction.end(), direction.begin(), 0.0));
        REQUIRE(norm > 0.1);
        const std::vector<float> start(net.parameter_data(), net.parameter_data() + elems);
        const auto loss_at = [&](double h) {
            for (std::size_t i = 0; i < elems; ++i) {
                net.parameter_data()[i] =
                    static_cast<float>(double{start[i]} + h * double{direction[i]} / norm);
            }
            return loss();
        };
        const double h = 1e-3;
        const double slope = (loss_at(h) - loss_at(-h)) / (2 * h);
        // Rounding of a loss of about 35 to float: 2^-24 * 35 / h = 0.2 %; the rest is curvature.
        CHECK(slope == Approx(norm).epsilon(0.01));
        for (const Parameter& p : net.parameters()) {  // the padding between tensors stays zero
            for (std::int64_t i = p.offset_elems + p.elems; i % Net::kAlignElems != 0; ++i) {
                CHECK(net.gradient_data()[i] == 0.0f);
            }
        }
    }
}

TEST_CASE("a step on a GPU allocates nothing") {
    const auto backend = make_emulated_backend({});
    Net net(*backend, load_model("net"), {1, 28, 28}, 10, {33, 50, true});
    const DeviceBuffer<std::int32_t> samples(*backend, 50);
    const DeviceBuffer<StepScalars> scalars(*backend, 1);
    std::int64_t before = 0;
    for (const int n : {33, 1, 33, 20}) {
        before = before == 0 ? emulated::emulator::allocation_count() : before;
        Batch pass;
        pass.n = n;
        pass.samples = samples.get();
        pass.training = true;
        net.forward(pass);
        net.loss(pass, 1.0f, net.gradient_data() + net.tail_offset());
        net.backward(pass, [](std::int64_t) {});
        backend->sgd_step({.scalars = scalars.get()}, net.flat_elems(), net.parameter_data(),
                          net.gradient_data(), nullptr);
        backend->clip_norm(net.flat_elems(), 1.0f, net.gradient_data(), {});
    }
    Batch evaluation;
    evaluation.n = 50;
    net.forward(evaluation);
    backend->synchronize();
    CHECK(emulated::emulator::allocation_count() == before);
}

TEST_CASE("weights go to disk and back, and only whole files count") {
    const TempDir dir;
    const auto backend = make_cpu_backend(1);
    Net net(*backend, load_model("net"), {1, 28, 28}, 10, {1, 1, true});
    net.initialise(1);
    const auto path = dir.path() / "w.safetensors";
    write_safetensors(path, {net.export_parameters(), {{"gyre.model", "text\n"}}});
    const TensorFile file = read_safetensors(path);
    CHECK(file.metadata.at("gyre.model") == "text\n");
    CHECK(file.metadata.at("format") == "pt");
    Net other(*backend, load_model("net"), {1, 28, 28}, 10, {1, 1, true});
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
    Net larger(*backend, load_model("net"), {1, 32, 32}, 10, {1, 1, true});
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
    const std::string good = R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})";
    write_file(path, safetensors_bytes(good, "12345678"));
    CHECK(read_safetensors(path).tensors.at(0).values.size() == 2);
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

TEST_CASE("weights named by PyTorch's wrappers and containers are matched, or refused") {
    const auto backend = make_cpu_backend(1);
    const TempDir dir;
    using Names = std::vector<std::string>;
    // Renames the layers of a model's weights, and takes them back by way of a file, which does
    // not keep the order: the remarks, or the refusal's text.
    const auto import_as = [&](const std::string& text, const Names& layers,
                               const std::string& prefix = "") {
        const ModelSpec model = text == "net" ? load_model(text) : parse_model(text, "mine");
        const Shape shape = text == "net" ? Shape{1, 28, 28} : Shape{1, 2, 3};
        Net net(*backend, model, shape, 10, {1, 1, true});
        net.initialise(1);
        const auto original = net.export_parameters();
        TensorFile file{original, {}};
        for (std::size_t i = 0; i < file.tensors.size(); ++i) {
            std::string& name = file.tensors[i].name;
            name =
                prefix + (layers.empty() ? name : layers.at(i / 2) + name.substr(name.find('.')));
        }
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
    };
    const auto expect_remarks = [&](const std::string& text, const Names& layers,
                                    const std::string& prefix,
                                    std::initializer_list<std::string> parts) {
        const std::string remarks = import_as(text, layers, prefix);
        INFO(remarks);
        for (const std::string& part : parts) {
            CHECK(remarks.find(part) != std::string::npos);
        }
    };
    const auto refuse = [&](const std::string& text, const Names& layers,
                            std::initializer_list<std::string> parts) {
        expect_error(ExitCode::bad_input, parts, [&] { import_as(text, layers); });
        // Both sides are listed.
        expect_error(ExitCode::bad_input,
                     {layers.back() + ".bias [10]", text == "net" ? "fc2.bias [10]" : "fc"},
                     [&] { import_as(text, layers); });
    };

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

    const std::string same = "linear 6\nlinear 6\nlinear classes\n";
    refuse(same, {"a.0", "b.0", "c.0"}, {"'a.0'", "'b.0'", "do not tell which"});
    refuse(same, {"0", "first", "c"}, {"do not tell which"});
    refuse("net", {"conv1", "conv2", "lin1", "lin2"}, {"the net has no parameter 'lin1.bias'"});
    refuse("net", {"0", "1", "2", "1"}, {"the net has 4 layers with parameters, the file 3"});
    refuse("linear 6\nlinear 5\nlinear classes\n", {"0", "2", "1"},
           {"'2' is fc2", "'1' is fc3", "against their order"});

    Net net(*backend, load_model("net"), {1, 28, 28}, 10, {1, 1, true});
    auto tensors = net.export_parameters();
    tensors[0].dtype = "F16";
    CHECK(net.import_parameters(tensors, "w") ==
          std::vector<std::string>{"F16 tensors are converted to F32"});
    for (HostTensor& tensor : tensors) {
        tensor.name = std::string("x").append(tensor.name);
    }
    Net larger(*backend, load_model("net"), {1, 32, 32}, 10, {1, 1, true});
    expect_error(ExitCode::bad_input,
                 {"nothing in the file has the shapes of fc1", "xfc1.weight [50, 320]",
                  "fc1.weight [50, 500]"},
                 [&] { larger.import_parameters(tensors, "w"); });
    tensors.pop_back();
    expect_error(ExitCode::bad_input, {"nothing in the file has the shapes of fc2"},
                 [&] { net.import_parameters(tensors, "w"); });
    expect_error(ExitCode::bad_input, {"the file has nothing"},
                 [&] { net.import_parameters({}, "w"); });
}
