// Nets as graphs: residual connections, the fusing pass, and memory planned by liveness.
#include <random>

#include "model/fuse.hpp"
#include "model/memory_plan.hpp"
#include "model/net.hpp"
#include "tests/catch.hpp"
#include "tests/expect_error.hpp"

using namespace gyre;
using namespace gyre::model;
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
    expect_error(ExitCode::bad_input, {"line 1", "'a+b' is no name"},
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
