// Model files, shapes, initial parameters, and the gradient of a whole net.
#include <algorithm>
#include <cmath>
#include <numeric>

#include "base/error.hpp"
#include "kernels/emulation/emulator.hpp"
#include "kernels/make_backend.hpp"
#include "model/net.hpp"
#include "model/spec.hpp"
#include "tests/support/built_file.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/clip_norm.hpp"
#include "tests/support/expect_error.hpp"

using namespace gyre;
using namespace gyre::model;
using gyre::test::built_file;
using gyre::test::expect_error;

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
    const Net wide(*backend, load_model("wide"), {1, 28, 28}, 10, {4, 4});
    CHECK(wide.parameter_count() == 25775882);
    const Net resnet18(*backend, load_model(built_file("tests/examples/resnet18.model")),
                       {3, 64, 64}, 1000, {});
    CHECK(resnet18.parameter_count() == 11689512);
    CHECK(resnet18.state().size() == 40);  // two statistics of each batch normalisation
}

TEST_CASE("torchvision's nets have as many parameters as there") {
    struct Known {
        const char* name;
        std::int64_t elems;
        std::vector<int> sides = {32, 224};
    };
    const Known nets[] = {{"resnet18", 11689512},         {"resnet50", 25557032},
                          {"densenet121", 7978856},       {"mobilenet_v2", 3504872},
                          {"efficientnet_b0", 5288548},   {"mobilenet_v3_small", 2542856},
                          {"vgg11_bn", 132868840, {224}}, {"squeezenet1_1", 1235496},
                          {"shufflenet_v2_x1_0", 2278604}};
    for (const auto& [name, expected, sides] : nets) {
        INFO(name);
        const ModelSpec model =
            load_model(built_file("tests/examples/" + std::string(name) + ".model"));
        for (const int side : sides) {
            std::int64_t elems = 0;
            for (const Node& node : build_graph(model, {3, side, side}, 1000, true).nodes) {
                for (const Parameter& parameter : node.parameters) {
                    elems += parameter.fixed ? 0 : parameter.elems;
                }
            }
            CHECK(elems == expected);
        }
    }
}

TEST_CASE("nets take their input and classes from the data") {
    const auto backend = make_cpu_backend(1);
    const Net small(*backend, load_model("net"), {3, 20, 33}, 63, {4, 4});
    CHECK(small.parameters()[0].shape == std::vector<std::int64_t>{10, 3, 5, 5});
    CHECK(small.parameters().back().shape == std::vector<std::int64_t>{63});
}

TEST_CASE("model files: comments, options and defaults") {
    const ModelSpec model = parse_model(
        "# a comment\n\n  conv 8 k3 s2 p1   # first\nmaxpool 3 s2\r\nmaxpool 2\nlinear classes\n"
        "conv 8 nobias k3\nmaxpool 3 p1 s2\n",
        "mine");
    REQUIRE(model.layers.size() == 6);
    CHECK(model.layers[0].bias);
    CHECK(!model.layers[4].bias);
    CHECK(model.layers[5].padding == 1);
    CHECK(model.layers[0].stride == 2);
    CHECK(model.layers[0].padding == 1);
    CHECK(model.layers[0].line == 3);
    CHECK(model.layers[1].stride == 2);
    CHECK(model.layers[2].stride == 2);
    CHECK(model.layers[3].out == 0);
}

TEST_CASE("model files: every mistake is named with its line") {
    expect_bad_model("", {"mine", "no layers"});
    expect_bad_model("relu\nconvolution 3\n", {"line 2", "convolution", "conv OUT|classes kK"});
    expect_bad_model("conv\n", {"line 1", "missing", "conv OUT|classes kK"});
    expect_bad_model("conv 8\n", {"line 1", "kK is missing"});
    expect_bad_model("conv 8 k0\n", {"'k0'"});
    expect_bad_model("conv 8 k3 s0\n", {"'s0'"});
    expect_bad_model("conv 8 k3 p-1\n", {"'p-1'"});
    expect_bad_model("conv 8 k3 k5\n", {"'k5' was not expected"});
    expect_bad_model("conv 8 k3 q1\n", {"'q1' was not expected"});
    expect_bad_model("conv 8 k3 g0\n", {"'g0'"});
    expect_bad_model("maxpool 2 g2\n", {"'g2' was not expected"});
    expect_bad_model("conv 8 k3 nobias nobias\n", {"'nobias' was not expected"});
    expect_bad_model("conv 8 k3 nope\n", {"'nope'", "[nobias]"});
    expect_bad_model("maxpool 2 nobias\n", {"'nobias' was not expected"});
    expect_bad_model("chunk 2\n", {"'2' must be a part such as 1/2"});
    expect_bad_model("chunk 0/2\n", {"0/2"});
    expect_bad_model("groupnorm\n", {"the number of groups"});
    expect_bad_model("groupnorm 0\n", {"the number of groups"});
    expect_bad_model("groupnorm 2 eps\n", {"the epsilon"});
    expect_bad_model("groupnorm 2 momentum 0.1\n", {"'momentum' was not expected"});
    expect_bad_model("batchnorm noaffine noaffine\n", {"'noaffine' was not expected"});
    expect_bad_model("groupnorm 2 local\n", {"'local' was not expected"});
    expect_bad_model("maxpool 2 c1\n", {"'c1' was not expected"});
    expect_bad_model("conv 4 k3 n5\n", {"'n5' was not expected"});
    expect_bad_model("conv 4 k3 ceil\n", {"'ceil' was not expected"});
    expect_bad_model("conv 0 k3\n", {"'0'"});
    expect_bad_model("conv 99999999999 k3\n", {"'99999999999'"});
    expect_bad_model("conv 8.5 k3\n", {"'8.5'"});
    expect_bad_model("dropout\n", {"probability is missing"});
    expect_bad_model("dropout 1.5\n", {"1.5", "between 0 and 1"});
    expect_bad_model("dropout nan\n", {"between 0 and 1"});
    expect_bad_model("linear many\n", {"'many'"});
    expect_bad_model("relu 3\n", {"'3' was not expected"});
    expect_bad_model("leaky_relu\n", {"the slope below zero is missing", "leaky_relu SLOPE"});
    for (const char* slope : {"0", "-0.1", "nan", "inf", "0.1x"}) {
        expect_bad_model(std::string("leaky_relu ") + slope + "\n",
                         {slope, "must be a number above 0", "0.01"});
    }
    expect_bad_model("relu6 3\n", {"'3' was not expected"});
    expect_bad_model("batchnorm eps\n", {"the epsilon is missing"});
    expect_bad_model("batchnorm local eps 0\n", {"'0' as the epsilon", "1e-5"});
    expect_bad_model("batchnorm momentum -1\n", {"'-1' as the momentum", "0.1"});
    expect_bad_model("batchnorm eps 1e-3 eps 1e-3\n", {"'eps' was not expected"});
    expect_bad_model("batchnorm global\n", {"'global' was not expected", "[momentum M]"});
    expect_bad_model("gelu tanh\n", {"'tanh' was not expected"});
    expect_bad_model("log-softmax\nlinear 3\n", {"line 2", "nothing may follow"});
    expect_error(ExitCode::bad_input, {"no/such/model", "net, wide, resnet, airbench", "`model`"},
                 [] { load_model("no/such/model"); });
    // Only as much is read as a person writes.
    expect_error(ExitCode::bad_input, {"'/dev/zero'", "more than 1 MiB"},
                 [] { load_model("/dev/zero"); });
}

TEST_CASE("nets that do not fit name the layer and the shapes") {
    expect_misfit("conv 8 k9\nlinear classes\n", {1, 8, 8}, 10, {"line 1", "9 x 9", "[1, 8, 8]"});
    expect_misfit("maxpool 4\nmaxpool 4\nlinear classes\n", {3, 8, 9}, 10,
                  {"line 2", "4 x 4", "[3, 2, 2]", "[3, 8, 9]"});
    expect_misfit("maxpool 3 s2 p2\nlinear classes\n", {1, 8, 8}, 10,
                  {"line 1", "padding 2 is more than half of its window"});
    expect_misfit("conv 6 k1\nconv 8 k1 g4\nlinear classes\n", {1, 8, 8}, 10,
                  {"line 2", "4 groups", "6 input channels", "8 outputs"});
    expect_misfit("conv 8 k1\nconv 6 k1 g4\nlinear classes\n", {1, 8, 8}, 10,
                  {"line 2", "4 groups", "8 input channels", "6 outputs"});
    expect_misfit(
        "conv 6 k1\nas a\navgpool global\nconv 5 k1\nmul a\nlinear classes\n", {1, 8, 8}, 10,
        {"line 5", "'a' is [6, 8, 8]", "one number for each of its channels", "conv 6 k1"});
    expect_misfit("conv 6 k1\nas a\nconv 6 k1\nmul a\nlinear classes\n", {1, 8, 8}, 10,
                  {"line 4", "avgpool global"});
    expect_misfit("conv 6 k1\nas a\nlinear 6\nmul a\nlinear classes\n", {1, 8, 8}, 10,
                  {"line 4", "flat"});
    expect_misfit("conv 6 k1\nas a\nconv 6 k2\nconcat a\nlinear classes\n", {1, 8, 8}, 10,
                  {"line 4", "'a' is [6, 8, 8]", "only numbers of channels may differ"});
    expect_misfit("linear 8\nconv 3 k1\nlinear classes\n", {1, 8, 8}, 10,
                  {"line 2", "flat", "[8]"});
    expect_misfit("linear 8\ndropout2d 0.5\n", {1, 8, 8}, 8, {"line 2", "flat"});
    expect_misfit("linear 8\n", {1, 8, 8}, 10, {"[8]", "10 classes", "linear classes"});
    expect_misfit("conv 4 k3 p1000000\navgpool global\nlinear classes\n", {1, 28, 28}, 10,
                  {"line 1", "output [4, 2000026, 2000026] has more than 2^30 elements"});
    expect_misfit("linear classes\n", {1, 32769, 32768}, 10, {"line 1", "more than 2^30"});
    expect_misfit("relu\n", {10, 1, 1}, 10, {"nothing to learn"});
    expect_misfit("chunk 3/2\nlinear classes\n", {4, 8, 8}, 10, {"have no part 3"});
    expect_misfit("chunk 4/4\nlinear classes\n", {5, 8, 8}, 10, {"have no part 4"});
    expect_misfit("shuffle 2\nlinear classes\n", {3, 8, 8}, 10, {"must be a multiple of"});
    expect_misfit("groupnorm 2\nlinear classes\n", {3, 8, 8}, 10, {"must be a multiple of"});
    expect_misfit("maxpool 16\nlinear classes\n", {1, 32, 32}, 10, {"15 x 15"});
}

TEST_CASE("initial weights are uniform within PyTorch's bounds and follow the seed") {
    const auto backend = make_cpu_backend(1);
    Net net(*backend, load_model("net"), {1, 28, 28}, 10, {1, 1});
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
                {1, 20, 20}, 10,
                {.train_batch = 1, .eval_batch = 1, .spec = {.weight_init = init}});
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

TEST_CASE("the first filters of convolutions that begin as torch.nn.init.dirac_ pass channels on") {
    const auto backend = make_cpu_backend(1);
    const ModelSpec model = parse_model("conv 6 k3\nconv 2 k4\nlinear classes\n", "mine");
    const auto initial = [&](WeightInit init) {
        Net net(*backend, model, {4, 9, 9}, 10,
                {.train_batch = 1, .eval_batch = 1, .spec = {.weight_init = init}});
        net.initialise(3);
        return net.export_parameters();
    };
    const std::vector<HostTensor> plain = initial(WeightInit::automatic);
    std::vector<HostTensor> dirac = initial(WeightInit::dirac);
    const auto check_first = [&](HostTensor& tensor, int filters, int channels, int side) {
        for (int f = 0; f < filters; ++f) {
            for (int i = 0; i < channels * side * side; ++i) {
                float& value =
                    tensor.values[static_cast<std::size_t>(f * channels * side * side + i)];
                const int middle = (f * side + side / 2) * side + side / 2;
                CHECK(value == (i == middle ? 1.0f : 0.0f));
            }
        }
    };
    check_first(dirac[0], 4, 4, 3);
    check_first(dirac[2], 2, 6, 4);
    for (std::size_t i = 4 * 4 * 9; i < dirac[0].values.size(); ++i) {
        CHECK(dirac[0].values[i] == plain[0].values[i]);
    }
    for (const std::size_t same : {1, 3, 4, 5}) {
        CHECK(dirac[same].values == plain[same].values);
    }
}

TEST_CASE("no two initial weights come from the same random number") {
    const auto backend = make_cpu_backend(1);
    Net net(*backend, parse_model("linear 8\nlinear 8\nlinear classes\n", "mine"), {1, 2, 4}, 8,
            {1, 1});
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
    // For one image the gradient of a linear layer's weights is zero where its input was dropped.
    const auto dropped = [&](const std::string& text, std::size_t parameter) {
        const Shape shape{1, 4, 8};
        Net net(*backend, parse_model(text, "mine"), shape, 3, {1, 0});
        net.initialise(4);
        const std::vector<float> x(static_cast<std::size_t>(shape.elems()), 1.0f);
        backend->import_activation(shape, 1, x.data(), net.input().f32());
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
        net.loss(pass, 1.0f, net.gradient_data() + net.stats_offset());
        net.backward(pass);
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
         {"conv 4 k3\nas x\navgpool global\nconv 3 k1\nrelu\nconv 4 k1\nsigmoid\nmul x\nas y\n"
          "conv 2 k1\nconcat y\nas z\navgpool global\nmul z\nconcat z\nconcat x\nlinear classes\n",
          "as i\nconv 2 k1\nconcat i\navgpool global\nas g\nmul g\nconcat g\nlinear 7\nas "
          "v\nlinear 5\n"
          "concat v\nlinear classes\n",
          "conv 6 k3\nbatchnorm\nrelu\nconv 12 k3 s2 p1 g6\nrelu\nconv 8 k1 g4\nlinear classes\n",
          "conv 4 k3 p1\nrelu\ndropout2d 0.3\nmaxpool 2\nconv 5 k3 s2\nrelu\nlinear 12\nrelu\n"
          "dropout 0.5\nlinear classes\n",
          "linear 9\nrelu\nlinear classes\n", "conv 3 k2\nmaxpool 3 s2 ceil\nlinear classes\n",
          "conv 6 k2\nshuffle 3\nas x\nchunk 1/4\nconv 3 k1\nas l\nfrom x\nchunk 3/3\nrelu\n"
          "concat l\nconv classes k1\navgpool global\n",
          "conv 4 k3\nbatchnorm\nrelu\navgpool 2\nconv 6 k3\nbatchnorm\navgpool global\nlinear "
          "classes\n",
          "conv 4 k3 p1\ngelu\nas x\nconv 4 k3 p1\nsilu\nadd x\nleaky_relu 0.1\nmaxpool 2\n"
          "linear 12\nleaky_relu 0.3\ndropout 0.5\nsilu\nlinear classes\n",
          "conv 4 k3 p1\nhardswish\nas x\nconv 4 k3 p1\nsigmoid\nadd x\nrelu6\nmaxpool 2\nlinear "
          "12\nhardsigmoid\nlinear classes\n",
          "conv 4 k3\ngroupnorm 2 eps 0.01\nsilu\nconv 6 k3\nbatchnorm noaffine\nsilu\nlinear 9\n"
          "groupnorm 1\nlinear classes\n",
          "conv 4 k3\ngroupnorm 4 noaffine\nsilu\nlinear classes\n",
          // A dropout scales what it keeps by 10, in place, far out of these functions' ranges.
          "linear 40\nrelu6\ndropout 0.9\nlinear classes\n",
          "linear 40\nsigmoid\ndropout 0.9\nlinear classes\n",
          "linear 40\nleaky_relu 0.1\ndropout 0.9\nlinear classes\n",
          "relu\nlinear 9\nas x\nrelu\nadd x\nadd x\nas y\nlinear 9\nadd y\nrelu\nlinear classes\n",
          "conv 4 k3 p1\nas x\nrelu\nas r\nconv 6 k3 s2 p1\nrelu\nconv 6 k3 p1\nas y\nfrom x\n"
          "conv 6 k1 s2\nadd y\nrelu\ndropout 0.2\nas z\nconv 6 k3 p1\nadd z\nas v\nfrom r\n"
          "conv 6 k3 s2 p1\nadd v\nlinear classes\n"}) {
        INFO(text);
        const int n = 20;
        const Shape shape{2, 9, 11};
        Net net(*backend, parse_model(text, "mine"), shape, 5, {n, 0});
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
            backend->import_activation(shape, n, x.data(), net.input().f32());
            for (int i = 0; i < n; ++i) {
                net.labels()[i] = i % 5;
            }
            net.forward(pass);
            net.loss(pass, 1.0f, sums.get());
            return double{sums.get()[0]};
        };
        loss();
        std::vector<std::int64_t> order;
        const auto ready = [&](std::int64_t offset) { order.push_back(offset); };
        net.backward(pass, {.ready = ready});
        // Layers are final from the last to the first, each once.
        const std::vector<std::int64_t> expected(net.layer_begins().rbegin(),
                                                 net.layer_begins().rend());
        CHECK(order == expected);

        // Along the gradient itself, scaled to length 1, the slope is the gradient's norm: of all
        // parameters together, and of each one, whose gradient a larger one would hide.
        const auto elems = static_cast<std::size_t>(net.flat_elems());
        const std::vector<float> gradient(net.gradient_data(), net.gradient_data() + elems);
        const std::vector<float> start(net.parameter_data(), net.parameter_data() + elems);
        const auto check_slope = [&](std::size_t begin, std::size_t count) {
            const auto at = gradient.begin() + static_cast<std::ptrdiff_t>(begin);
            const auto end = at + static_cast<std::ptrdiff_t>(count);
            const double norm = std::sqrt(std::inner_product(at, end, at, 0.0));
            const auto loss_at = [&](double h) {
                for (std::size_t i = begin; i < begin + count; ++i) {
                    net.parameter_data()[i] =
                        static_cast<float>(double{start[i]} + h * double{gradient[i]} / norm);
                }
                return loss();
            };
            const double h = 1e-3;
            const double slope = (loss_at(h) - loss_at(-h)) / (2 * h);
            std::copy(start.begin(), start.end(), net.parameter_data());
            // Rounding of a loss of about 35 to float: 2^-24 * 35 / h = 0.002; the rest is
            // curvature.
            CHECK(slope == Approx(norm).epsilon(0.01).margin(0.01));
            return norm;
        };
        REQUIRE(check_slope(0, elems) > 0.1);
        for (const Parameter& p : net.parameters()) {
            INFO(p.name);
            CHECK(check_slope(static_cast<std::size_t>(p.offset_elems),
                              static_cast<std::size_t>(p.elems)) > 0.0);
        }
        for (const Parameter& p : net.parameters()) {  // the padding between tensors stays zero
            for (std::int64_t i = p.offset_elems + p.elems; i % Net::kAlignElems != 0; ++i) {
                CHECK(net.gradient_data()[i] == 0.0f);
            }
        }
    }
}

TEST_CASE("a step on a GPU allocates nothing") {
    const auto backend = make_emulated_backend({});
    Net net(*backend, load_model("net"), {1, 28, 28}, 10, {33, 50});
    const DeviceBuffer<std::int32_t> samples(*backend, 50);
    const DeviceBuffer<StepScalars> scalars(*backend, 1);
    const DeviceBuffer<GradientFacts> facts(*backend, 1);
    std::int64_t before = 0;
    for (const int n : {33, 1, 33, 20}) {
        before = before == 0 ? simt::emulator::allocation_count() : before;
        Batch pass;
        pass.n = n;
        pass.samples = samples.get();
        pass.training = true;
        net.forward(pass);
        net.loss(pass, 1.0f, net.gradient_data() + net.stats_offset());
        net.backward(pass);
        backend->update({.scalars = scalars.get()}, net.flat_elems(), net.parameter_data(),
                        net.gradient_data());
        test::clip_norm(*backend, facts.get(), net.flat_elems(), 1.0f, net.gradient_data());
    }
    Batch evaluation;
    evaluation.n = 50;
    net.forward(evaluation);
    backend->synchronize();
    CHECK(simt::emulator::allocation_count() == before);
}
