// Nets as graphs: residual connections, the fusing pass, and memory planned by liveness.
#include <algorithm>
#include <random>

#include "model/fuse.hpp"
#include "model/memory_plan.hpp"
#include "model/net.hpp"
#include "tests/model/bounded_net.hpp"
#include "tests/support/backends.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/expect_error.hpp"

using namespace gyre;
using namespace gyre::model;
using gyre::test::Bounded;
using gyre::test::BoundedNet;
using gyre::test::check_within;
using gyre::test::expect_error;

namespace {

const Shape kInput{2, 9, 11};

Graph graph_of(const std::string& text) {
    return build_graph(parse_model(text, "mine"), kInput, 5, true);
}
std::vector<std::string> names_of(const Graph& graph) {
    std::vector<std::string> names;
    for (const Node& node : graph.nodes) {
        names.push_back(node.name);
    }
    return names;
}
void expect_misfit(const std::string& text, std::initializer_list<std::string> parts) {
    INFO(text);
    expect_error(ExitCode::bad_input, parts, [&] { graph_of(text); });
}

constexpr const char* kResidual =
    "conv 4 k3 p1\nrelu\nas x\nconv 6 k3 s2 p1\nrelu\nconv 6 k3 p1\nas y\nfrom x\nconv 6 k1 s2\n"
    "add y\nrelu\nas z\nconv 6 k3 p1\nadd z\nadd z\nrelu\nlinear classes\n";

// Every kind of layer, and each that can be fused beside such as cannot.
constexpr const char* kEveryLayer =
    "conv 6 k5 p2\nbatchnorm\nrelu\nas x\nconv 8 k1 s2\nbatchnorm local\nas y\nfrom x\n"
    "conv 8 k3 s2 p1\ndropout2d 0.5\nrelu\nconv 8 k3 p1 g8 nobias\nbatchnorm noaffine\nadd "
    "y\nrelu\n"
    "conv 7 k2\nrelu\nmaxpool 2 s1\nas m\navgpool global\nconv 7 k1\nsigmoid\nmul m\nconcat m\n"
    "maxpool 3 s1 p1\navgpool 2 s1\nshuffle 2\nas s\nchunk 1/2\nas h\nfrom s\nchunk 2/2\n"
    "groupnorm 7 noaffine\nconv 5 k1\n"
    "relu\nconcat h\nmaxpool 2 ceil\nconv 9 k1\nrelu\navgpool global\n"
    "linear 12\nrelu\nas v\nlinear 12\ngroupnorm 1\ngelu\nadd v\nsilu\nlinear 12\nleaky_relu "
    "0.1\ndropout 0.5\n"
    "linear classes\n";

// The same, short: bounds grow with every layer, above all with batch normalisation. No
// convolution is computed by Winograd's formula, which has others.
constexpr const char* kShort =
    "conv 4 k5 p2\nrelu\nbatchnorm\nas x\nconv 4 k1\ndropout2d 0.5\nas y\nfrom x\n"
    "conv 4 k1 nobias\nadd y\nmaxpool 2 p1\navgpool 2 s1\nconv 6 k2 g2\nleaky_relu 0.3\nas e\n"
    "avgpool global\nmul e\nconcat e\nshuffle 3\nchunk 2/3\navgpool global\n"
    "linear 7\nrelu\ndropout 0.5\nlinear classes\n";
// Smooth activations have larger bounds, so without batch normalisation.
constexpr const char* kSmooth =
    "conv 4 k5 p2\ngelu\nas x\nconv 4 k1\nsilu\nadd x\navgpool 2 s1\navgpool global\nlinear 7\n"
    "hardswish\nlinear classes\n";

constexpr const char* kGroups =
    "conv 4 k3 nobias\ngroupnorm 2\ngelu\navgpool 2 s1\navgpool global\nlinear classes\n";

struct PassResults {
    std::vector<float> sums, evaluated, gradients, last_x, last_dy;
    std::vector<std::vector<float>> tensors;  // parameters, and running statistics as they are left
};

BoundedNet::Images images_of(int n) {
    BoundedNet::Images images{.n = n,
                              .x = gyre::test::random_floats(n * kInput.elems(), 71),
                              .labels = {},
                              .samples = {},
                              .seed = 5};
    for (int i = 0; i < n; ++i) {
        images.labels.push_back(i * 3 % 5);
        images.samples.push_back(i * 7 + 1);
    }
    return images;
}

void upload(Net& net, Backend& backend, const BoundedNet::Images& images) {
    backend.import_activation(kInput, images.n, images.x.data(), net.input().f32());
    backend.upload(net.labels(), images.labels.data(), images.labels.size() * sizeof(std::int32_t));
}

// The sums of the loss and of correct images.
std::vector<float> evaluate(Net& net, Backend& backend, const BoundedNet::Images& images) {
    upload(net, backend, images);
    const DeviceBuffer<float> device_sums(backend, 2);
    const Batch batch{.n = images.n, .training = false, .seed = images.seed};
    net.forward(batch);
    net.loss(batch, 1.0f / static_cast<float>(images.n), device_sums.get());
    std::vector<float> sums(2);
    backend.download(sums.data(), device_sums.get(), device_sums.bytes());
    return sums;
}

// A training pass forward and backward, and an evaluation pass.
PassResults run_passes(Net& net, Backend& backend, const BoundedNet::Images& images) {
    const int n = images.n;
    upload(net, backend, images);
    const DeviceBuffer<std::int32_t> samples(backend, n);
    backend.upload(samples.get(), images.samples.data(), samples.bytes());
    const DeviceBuffer<float> device_sums(backend, 2);
    const auto download = [&](const float* from, std::int64_t elems) {
        std::vector<float> values(static_cast<std::size_t>(elems));
        backend.download(values.data(), from, values.size() * sizeof(float));
        return values;
    };
    PassResults results;
    const Batch batch{.n = n, .training = true, .samples = samples.get(), .seed = images.seed};
    const float scale = 1.0f / static_cast<float>(n);
    net.forward(batch);
    net.loss(batch, scale, device_sums.get());
    results.sums = download(device_sums.get(), 2);
    const auto look = [&](const Batch&, std::size_t node, const Tensor& x, const Tensor& dy) {
        if (node + 1 == net.nodes().size()) {
            const Node& last = net.nodes().back();
            results.last_x.resize(static_cast<std::size_t>(n * last.in.elems()));
            results.last_dy.resize(static_cast<std::size_t>(n * last.out.elems()));
            backend.export_activation(last.in, n, x.f32(), results.last_x.data());
            backend.export_activation(last.out, n, dy.f32(), results.last_dy.data());
        }
        return false;
    };
    net.backward(batch, {.take = look});
    results.gradients = download(net.gradient_data(), net.flat_elems());
    results.evaluated = evaluate(net, backend, images);
    for (const HostTensor& tensor : net.export_parameters()) {
        results.tensors.push_back(tensor.values);
    }
    return results;
}

}  // namespace

TEST_CASE("model files: residual connections name values, add them and go on from them") {
    const Graph graph = graph_of(kResidual);
    CHECK(names_of(graph) == std::vector<std::string>{"conv1", "relu1", "conv2", "relu2", "conv3",
                                                      "conv4", "add1", "relu3", "conv5", "add2",
                                                      "add3", "relu4", "fc1"});
    CHECK(graph.nodes[5].inputs == std::vector<int>{1});
    CHECK(graph.nodes[6].inputs == std::vector<int>{5, 4});
    CHECK(graph.nodes[10].inputs == std::vector<int>{9, 7});

    expect_misfit("as x\nconv 3 k1\nadd x\nlinear classes\n",
                  {"line 3", "[2, 9, 11]", "[3, 9, 11]", "equal shapes", "conv 3 k1"});
    expect_misfit("add x\nlinear classes\n", {"line 1", "no value 'x'", "as x"});
    expect_misfit("as x\nas x\nlinear classes\n", {"line 2", "'x' already"});
    expect_misfit("as x\nconv 3 k1\nfrom x\nlinear classes\n", {"line 2", "nothing uses"});
    expect_misfit("linear 7\nas x\nlinear classes\nas y\nfrom y\nrelu\nfrom y\n",
                  {"line 6", "nothing uses"});
    expect_error(ExitCode::bad_input, {"line 1", "a name is missing", "as NAME"},
                 [] { parse_model("as\n", "mine"); });
    expect_error(ExitCode::bad_input, {"line 1", "'a+b' is not a name"},
                 [] { parse_model("as a+b\n", "mine"); });
}

TEST_CASE("fusing: chains become one node, and fall apart again where they must") {
    const Graph parts = graph_of(
        "conv 4 k3\nrelu\nmaxpool 2\nconv 4 k3 p1\ndropout2d 0.5\nconv 4 k1\nrelu\nlinear 7\n"
        "relu\ndropout 0.5\nlinear classes\n");
    const Graph whole = fuse(parts);
    CHECK(names_of(whole) == std::vector<std::string>{"conv1+relu1+pool1", "conv2", "dropout1",
                                                      "conv3+relu2", "fc1+relu3", "dropout2",
                                                      "fc2"});
    const auto& first = std::get<Conv2dSpec>(whole.nodes[0].spec);
    CHECK(first.relu);
    CHECK(first.pool_kernel == 2);
    CHECK(first.out() == Shape{4, 3, 4});
    Graph again = whole;
    for (std::size_t i = 0; i < again.nodes.size();) {
        if (again.nodes[i].parts.empty()) {
            ++i;
        } else {
            again = split(again, i);
        }
    }
    REQUIRE(names_of(again) == names_of(parts));
    for (std::size_t i = 0; i < parts.nodes.size(); ++i) {
        CHECK(again.nodes[i].inputs == parts.nodes[i].inputs);
    }
}

TEST_CASE("fusing leaves alone what somebody else reads") {
    const Graph whole = fuse(graph_of(kResidual));
    CHECK(names_of(whole) == std::vector<std::string>{"conv1+relu1", "conv2+relu2", "conv3",
                                                      "conv4", "add1", "relu3", "conv5", "add2",
                                                      "add3", "relu4", "fc1"});
    CHECK(whole.nodes[4].inputs == std::vector<int>{3, 2});
    CHECK(whole.nodes[8].inputs == std::vector<int>{7, 5});
    CHECK(names_of(fuse(graph_of("conv 4 k3\nas x\nrelu\nadd x\nlinear classes\n"))) ==
          std::vector<std::string>{"conv1", "relu1", "add1", "fc1"});
}

TEST_CASE("batchnorms fold into the layers before them: the same logits where nothing is rounded") {
    const ModelSpec model = parse_model(
        "conv 4 k5 p2 nobias\nbatchnorm eps 1\nrelu\nas x\nconv 4 k1 g4\n"
        "batchnorm eps 1 noaffine\nadd x\nrelu\nas z\nbatchnorm eps 1\nadd z\nconv 6 k2\nas w\n"
        "batchnorm eps 1\nadd w\nmaxpool 2\nlinear 8\nbatchnorm eps 1\nrelu\nlinear classes\n",
        "mine");
    std::vector<Fold> folds;
    const Graph folded = fold_batchnorms(build_graph(model, kInput, 5, true), folds);
    CHECK(names_of(folded) == std::vector<std::string>{"conv1+bn1", "relu1", "conv2+bn2", "add1",
                                                       "relu2", "bn3", "add2", "conv3", "bn4",
                                                       "add3", "pool1", "fc1+bn5", "relu3", "fc2"});
    CHECK(folded.nodes[3].inputs == std::vector<int>{2, 1});
    CHECK(folded.nodes[9].inputs == std::vector<int>{8, 7});
    CHECK(folds.size() == 3);

    const int n = 3;
    std::mt19937 random(1);
    const auto integer = [&](int least, int most) {
        return static_cast<float>(least + static_cast<int>(random() % unsigned(most - least + 1)));
    };
    BoundedNet::Images images = images_of(n);
    std::ranges::generate(images.x, [&] { return integer(0, 2); });
    for (const auto& make :
         {+[] { return make_cpu_backend(1); }, +[] { return make_emulated_backend({}); }}) {
        const auto backend = make();
        INFO(backend->description());
        NetOptions options{.train_batch = 0, .eval_batch = n};
        Net apart(*backend, model, kInput, 5, options);
        options.spec.fold = true;
        Net whole(*backend, model, kInput, 5, options);
        REQUIRE(whole.nodes().size() + 3 <= apart.nodes().size());
        std::vector<HostTensor> tensors = apart.export_parameters();
        for (HostTensor& tensor : tensors) {
            const bool norm = tensor.name.starts_with("bn");
            const bool scale = norm && tensor.name.ends_with(".weight");
            const bool variance = tensor.name.ends_with("running_var");
            for (float& value : tensor.values) {  // variance + epsilon has an exact root
                value = variance ? 3.0f : scale ? integer(1, 2) : integer(-1, 1);
            }
        }
        const auto logits = [&](Net& net) {
            CHECK(net.import_parameters(tensors, "the tensors").empty());
            upload(net, *backend, images);
            const Batch batch{.n = n, .training = false};
            net.forward(batch);
            return net.export_logits(batch);
        };
        const std::vector<float> expected = logits(apart);
        CHECK(std::ranges::count(expected, 0.0f) < 3);
        CHECK(logits(whole) == expected);
        std::erase_if(tensors, [](const HostTensor& t) { return t.name == "bn1.running_mean"; });
        expect_error(ExitCode::bad_input, {"parameter 'bn1.running_mean' is missing"},
                     [&] { whole.import_parameters(tensors, "the tensors"); });
    }
}

TEST_CASE("a net of every kind of layer computes the same with and without fusing") {
    for (const int threads : {1, 3}) {
        const auto backend = make_cpu_backend(threads);
        for (const int n : {1, 5, 17}) {
            INFO(threads << " threads, n = " << n);
            const auto net_of = [&](bool fuse, int train_batch) {
                NetOptions options{.train_batch = train_batch, .eval_batch = n};
                options.spec.fuse = fuse;
                return Net(*backend, parse_model(kEveryLayer, "mine"), kInput, 5, options);
            };
            Net whole = net_of(true, n), parts = net_of(false, n);
            REQUIRE(whole.nodes().size() < parts.nodes().size());
            whole.initialise(7);
            CHECK(parts.import_parameters(whole.export_parameters(), "the other").empty());
            const PassResults a = run_passes(whole, *backend, images_of(n));
            const PassResults b = run_passes(parts, *backend, images_of(n));
            // dropout2d doubles, which rounds nothing: the gradients are the same, too.
            CHECK(a.sums == b.sums);
            CHECK(a.evaluated == b.evaluated);
            for (const bool fuse : {true, false}) {  // what only evaluates, as gyre eval's
                Net alone = net_of(fuse, 0);
                alone.import_parameters(whole.export_parameters(), "the other");
                CHECK(evaluate(alone, *backend, images_of(n)) == a.evaluated);
            }
            CHECK(a.last_x == b.last_x);
            CHECK(a.last_dy == b.last_dy);
            CHECK(a.gradients == b.gradients);
            CHECK(a.tensors == b.tensors);
            for (const Parameter& p : whole.parameters()) {
                INFO(p.name);
                const auto begin = a.gradients.begin() + p.offset_elems;
                const bool any =
                    std::any_of(begin, begin + p.elems, [](float g) { return g != 0.0f; });
                CHECK((any || n == 1));
            }
        }
    }
}

TEST_CASE("an evaluation of many images, which takes them in turns, gives each the same logits") {
    constexpr int kAll = 6000, kSome = 1000;
    const auto backend = make_cpu_backend(2);
    const ModelSpec model = parse_model(kEveryLayer, "mine");
    Net whole(*backend, model, kInput, 5, {.train_batch = 0, .eval_batch = kAll});
    Net part(*backend, model, kInput, 5, {.train_batch = 3, .eval_batch = kSome});
    whole.initialise(7);
    part.import_parameters(whole.export_parameters(), "the other");
    const BoundedNet::Images images = images_of(kAll);
    const auto logits = [&](Net& net, int first, int n) {
        BoundedNet::Images some = images;
        some.n = n;
        some.x.assign(images.x.begin() + first * kInput.elems(),
                      images.x.begin() + (first + n) * kInput.elems());
        some.labels.resize(static_cast<std::size_t>(n));
        upload(net, *backend, some);
        const Batch batch{.n = n, .training = false};
        net.forward(batch);
        return net.export_logits(batch);
    };
    std::vector<float> expected;
    for (int first = 0; first < kAll; first += kSome) {
        const std::vector<float> some = logits(part, first, kSome);
        expected.insert(expected.end(), some.begin(), some.end());
    }
    CHECK(logits(whole, 0, kAll) == expected);
    CHECK(logits(whole, 0, kAll - 1) == std::vector<float>(expected.begin(), expected.end() - 5));
    // The turns take less memory than all at once would.
    Net twice(*backend, model, kInput, 5, {.train_batch = 0, .eval_batch = 2 * kAll});
    const auto mebibytes = [](const Net& net) {
        const std::string text = net.description();
        return std::stod(text.substr(text.rfind(": ") + 2));
    };
    CHECK(mebibytes(twice) < 1.5 * mebibytes(whole));
}

TEST_CASE("a net of every kind of layer: loss and gradients match double precision") {
    const int n = 2;
    const char* const text = GENERATE(kShort, kSmooth, kGroups);
    INFO(text);
    const ModelSpec model = parse_model(text, "mine");
    const Graph graph = build_graph(model, kInput, 5, true);
    const BoundedNet::Images images = images_of(n);
    for (const auto& make :
         {+[] { return make_cpu_backend(1); }, +[] { return make_cpu_backend(3); },
          +[] { return make_emulated_backend({}); }}) {
        const auto backend = make();
        INFO(backend->description());
        Net net(*backend, model, kInput, 5, {.train_batch = n, .eval_batch = n});
        net.initialise(2);  // by which no choice is near
        const BoundedNet expected(graph, net.export_parameters(), images);
        REQUIRE(expected.undecided == 0);
        const PassResults found = run_passes(net, *backend, images);
        check_within({found.sums[0]}, {expected.loss});
        for (const Parameter& p : net.parameters()) {
            INFO(p.name);
            const auto begin = found.gradients.begin() + p.offset_elems;
            check_within({begin, begin + p.elems}, expected.gradients.at(p.name));
            // The bound says something: no wrong gradient of its size would pass.
            double largest = 0.0, off = 0.0;
            for (const Bounded& v : expected.gradients.at(p.name)) {
                largest = std::max(largest, std::abs(v.value));
                off = std::max(off, v.error);
            }
            CHECK(off < 0.5 * largest);
        }
    }
}

TEST_CASE("an evaluation keeps what a residual connection adds until it is added") {
    const ModelSpec model = parse_model(
        "conv 4 k3 p1\nas a\nconv 4 k3 p1\nrelu\nconv 4 k3 p1\nadd a\nlinear classes\n", "mine");
    const Graph graph = build_graph(model, kInput, 5, false);
    const BoundedNet::Images images = images_of(3);
    for (const auto& make :
         {+[] { return make_cpu_backend(2); }, +[] { return make_emulated_backend({}); }}) {
        const auto backend = make();
        INFO(backend->description());
        Net net(*backend, model, kInput, 5,
                {.train_batch = 0, .eval_batch = 3, .spec = {.dropout = false}});
        net.initialise(2);
        const BoundedNet expected(graph, net.export_parameters(), images);
        check_within({evaluate(net, *backend, images)[0]}, {expected.loss});
        CHECK(expected.loss.error < 1e-3);
    }
}

TEST_CASE("memory: blocks that live at the same time do not overlap, others share") {
    std::mt19937 random(3);
    for (int round = 0; round < 200; ++round) {
        std::vector<Lifetime> blocks(1 + random() % 20);
        std::size_t sum = 0;
        for (Lifetime& block : blocks) {
            block.bytes = random() % 5000;
            block.first = static_cast<int>(random() % 30);
            block.last = block.first + static_cast<int>(random() % 10) - 1;
            sum += (block.bytes + kBlockAlignBytes - 1) / kBlockAlignBytes * kBlockAlignBytes;
        }
        const MemoryPlan plan = plan_memory(blocks);
        CHECK(plan.bytes <= sum);
        for (std::size_t i = 0; i < blocks.size(); ++i) {
            CHECK(plan.offsets[i] % kBlockAlignBytes == 0);
            CHECK((blocks[i].never() || plan.offsets[i] + blocks[i].bytes <= plan.bytes));
            for (std::size_t j = 0; j < i; ++j) {
                const bool together = !blocks[i].never() && !blocks[j].never() &&
                                      blocks[i].first <= blocks[j].last &&
                                      blocks[j].first <= blocks[i].last;
                const bool apart = plan.offsets[i] >= plan.offsets[j] + blocks[j].bytes ||
                                   plan.offsets[j] >= plan.offsets[i] + blocks[i].bytes;
                CHECK((!together || apart));
            }
        }
    }
    // A chain of equal blocks, each needed by the next only, takes two.
    std::vector<Lifetime> chain;
    for (int i = 0; i < 10; ++i) {
        chain.push_back({1024, i, i + 1});
    }
    CHECK(plan_memory(chain).bytes == 2048);
}
