// The sum of several passes' gradients, against sums by hand in the same order.
#include "train/micro_batches.hpp"

#include <bit>
#include <cmath>
#include <cstdint>
#include <vector>

#include "base/sum_tree.hpp"
#include "kernels/make_backend.hpp"
#include "tests/support/catch.hpp"

using namespace gyre;
using namespace gyre::train;

namespace {

constexpr int kElems = 37;

using Gradients = std::vector<float>;

// Their magnitudes differ so much that another order of additions has another sum.
Gradients gradients_of(int pass) {
    Gradients values;
    for (int i = 0; i < kElems; ++i) {
        const int step = 7 * pass + 13 * i;
        values.push_back(std::ldexp(static_cast<float>(step % 19 - 9) / 7.0f, 3 * (step % 11)));
    }
    return values;
}

Gradients sum(const Gradients& a, const Gradients& b) {
    Gradients values;
    for (std::size_t i = 0; i < a.size(); ++i) {
        values.push_back(a[i] + b[i]);
    }
    return values;
}

Gradients running_sum(int passes) {
    Gradients values = gradients_of(0);
    for (int pass = 1; pass < passes; ++pass) {
        values = sum(values, gradients_of(pass));
    }
    return values;
}

// The sum of a node of the tree, by definition: its left child has the greatest power of two of its
// shards that is less than all.
Gradients tree_sum(const TreeNode& node) {
    const int count = node.last - node.first;
    if (count == 1) {
        return gradients_of(node.first);
    }
    const int width = static_cast<int>(std::bit_floor(static_cast<unsigned>(count - 1)));
    return sum(tree_sum({node.first, node.first + width}),
               tree_sum({node.first + width, node.last}));
}

// A step's result on the rank, whose passes have the gradients and the state of their numbers in
// the global batch.
struct Step {
    Step(const Sharding& sharding, int accumulate) {
        const int first = sharding.own_shards().first;
        const auto backend = make_cpu_backend(1);
        const DeviceBuffer<float> gradients(*backend, kElems), state(*backend, 1);
        MicroBatches passes(*backend, {gradients.get(), kElems}, {state.get(), 1}, sharding,
                            accumulate);
        for (int repeat = 0; repeat < 2; ++repeat) {  // the second finds what the first has left
            passes.begin_step();
            for (int i = 0; i < passes.passes(); ++i) {
                const int number = first + i;
                const Gradients own = gradients_of(number);
                std::copy(own.begin(), own.end(), gradients.get());
                *state.get() = static_cast<float>(number);
                const MicroBatches::Pass pass = passes.pass(sharding.global_batch, i);
                if (pass.last) {
                    for (const std::int64_t begin : {30, 29, 4, 0}) {
                        passes.add_earlier(begin);
                    }
                }
                passes.end_pass(pass);
            }
        }
        for (const float* node : passes.earlier_nodes()) {
            nodes.emplace_back(node, node + kElems);
        }
        found.assign(gradients.get(), gradients.get() + kElems);
        state_left = *state.get();
    }
    std::vector<Gradients> nodes;  // the earlier ones
    Gradients found;
    float state_left;
};

}  // namespace

TEST_CASE("gradients of passes become a running sum", "[micro_batches]") {
    for (const int passes : {1, 2, 3, 4, 7}) {
        INFO(passes << " passes");
        const Step step({.images = 100, .global_batch = 14}, passes);
        CHECK(step.found == running_sum(passes));
        CHECK(step.state_left == static_cast<float>(passes - 1));
    }
    CHECK(running_sum(4) != tree_sum({0, 4}));
}

TEST_CASE("gradients of shards become the nodes of a tree over all ranks'", "[micro_batches]") {
    for (const int shards : {1, 2, 3, 6, 8, 13, 16}) {
        for (int ranks = 1; ranks <= shards; ++ranks) {
            for (int rank = 0; rank < ranks; ++rank) {
                INFO(shards << " shards, rank " << rank << " of " << ranks);
                const Sharding sharding{.images = 100,
                                        .global_batch = 48,
                                        .rank = rank,
                                        .ranks = ranks,
                                        .shards = shards};
                const Step step(sharding, 1);
                const TreeNode own = sharding.own_shards();
                const std::vector<TreeNode> nodes = tree_nodes(own.first, own.last, shards);
                REQUIRE(step.nodes.size() + 1 == nodes.size());
                for (std::size_t i = 0; i + 1 < nodes.size(); ++i) {
                    CHECK(step.nodes[i] == tree_sum(nodes[i]));
                }
                CHECK(step.found == tree_sum(nodes.back()));
                // The state is that of the rank's first shard.
                CHECK(step.state_left == static_cast<float>(own.first));
            }
        }
    }
}

TEST_CASE("leaves add up at once where one after another would leave their nodes",
          "[micro_batches]") {
    const auto backend = make_cpu_backend(1);
    const DeviceBuffer<float> gradients(*backend, kElems);
    for (int rank = 0; rank < 3; ++rank) {
        const Sharding sharding{
            .images = 100, .global_batch = 48, .rank = rank, .ranks = 3, .shards = 16};
        const MicroBatches passes(*backend, {gradients.get(), kElems}, {}, sharding, 1);
        const TreeNode own = sharding.own_shards();
        std::vector<const float*> places = passes.earlier_nodes();
        places.push_back(gradients.get());
        const std::vector<TreeNode> expected = tree_nodes(own.first, own.last, 16);
        const LeafSums sums = passes.sums();
        CHECK(sums.flat == gradients.get());
        REQUIRE(sums.nodes.size() == expected.size());
        for (std::size_t i = 0; i < expected.size(); ++i) {
            CHECK(sums.nodes[i].first == expected[i].first - own.first);
            CHECK(sums.nodes[i].last == expected[i].last - own.first);
            CHECK(sums.nodes[i].flat == places[i]);
        }
        // Not if each gradient is rounded before it is added.
        const MicroBatches rounded(*backend, {gradients.get(), kElems}, {}, sharding, 1,
                                   {DataType::bfloat16, kElems});
        CHECK(rounded.sums().nodes.empty());
    }
}

TEST_CASE("shards side by side leave the same nodes as one after another", "[micro_batches]") {
    const auto backend = make_cpu_backend(1);
    const DeviceBuffer<float> gradients(*backend, kElems);
    for (int rank = 0; rank < 3; ++rank) {
        const Sharding sharding{
            .images = 100, .global_batch = 48, .rank = rank, .ranks = 3, .shards = 16};
        MicroBatches passes(*backend, {gradients.get(), kElems}, {}, sharding, 1);
        passes.begin_step();
        int end = kElems;
        for (const int begin : {30, 29, 4, 0}) {
            for (int i = 0; i < passes.passes(); ++i) {
                const Gradients own = gradients_of(sharding.own_shards().first + i);
                std::copy(own.begin() + begin, own.begin() + end, gradients.get() + begin);
                if (i + 1 < passes.passes()) {
                    passes.keep(i, begin);
                } else {
                    passes.add_earlier(begin);
                }
            }
            end = begin;
        }
        const Step step(sharding, 1);
        CHECK(Gradients(gradients.get(), gradients.get() + kElems) == step.found);
        const std::vector<const float*> nodes = passes.earlier_nodes();
        REQUIRE(nodes.size() == step.nodes.size());
        for (std::size_t i = 0; i < nodes.size(); ++i) {
            CHECK(Gradients(nodes[i], nodes[i] + kElems) == step.nodes[i]);
        }
    }
}

TEST_CASE("sums of shards that travel in 16 bits are rounded, each of them", "[micro_batches]") {
    constexpr int kShards = 3, kRounded = 20;
    const auto backend = make_cpu_backend(1);
    const DeviceBuffer<float> gradients(*backend, kElems);
    MicroBatches passes(*backend, {gradients.get(), kElems}, {},
                        {.images = 6, .global_batch = 6, .shards = kShards}, 1,
                        {DataType::bfloat16, kRounded});
    passes.begin_step();
    for (int i = 0; i < kShards; ++i) {
        const Gradients own = gradients_of(i);
        std::copy(own.begin(), own.end(), gradients.get());
        const MicroBatches::Pass pass = passes.pass(6, i);
        if (pass.last) {
            passes.add_earlier(25);
            passes.add_earlier(0);
        }
        passes.end_pass(pass);
    }
    const auto round = [](float value) {
        return narrow::from_bfloat16(narrow::to_bfloat16(value));
    };
    const Gradients a = gradients_of(0), b = gradients_of(1), c = gradients_of(2);
    for (std::size_t i = 0; i < kElems; ++i) {
        INFO(i);
        CHECK(gradients.get()[i] == (i < kRounded
                                         ? round(round(round(a[i]) + round(b[i])) + round(c[i]))
                                         : a[i] + b[i] + c[i]));
    }
}

TEST_CASE("a running sum begins at +0", "[micro_batches]") {
    const auto backend = make_cpu_backend(1);
    const DeviceBuffer<float> gradient(*backend, 1);
    MicroBatches passes(*backend, {gradient.get(), 1}, {}, {.images = 8, .global_batch = 8}, 2);
    passes.begin_step();
    for (int i = 0; i < 2; ++i) {
        *gradient.get() = -0.0f;
        const MicroBatches::Pass pass = passes.pass(8, i);
        if (pass.last) {
            passes.add_earlier(0);
        }
        passes.end_pass(pass);
    }
    CHECK(std::bit_cast<std::uint32_t>(*gradient.get()) == 0);
}

TEST_CASE("passes divide a rank's share of a step", "[micro_batches]") {
    const auto backend = make_cpu_backend(1);
    for (const int shards : {0, 7, 8}) {
        for (const std::int64_t images : {1, 5, 22}) {
            std::int64_t of_all_ranks = 0, global = 0;
            std::int64_t of_each = 0;  // all, as shards meet in an operation
            for (int rank = 0; rank < 2; ++rank) {
                INFO(shards << " shards, " << images << " images, rank " << rank);
                const Sharding sharding{100, 22, rank, 2, shards};
                const MicroBatches passes(*backend, {}, {}, sharding, 3);
                CHECK(passes.passes() == (shards == 0 ? 3
                                          : rank == 0 ? (shards + 1) / 2
                                                      : shards / 2));
                std::int64_t end = 0;
                for (int i = 0; i < passes.passes(); ++i) {
                    const MicroBatches::Pass pass = passes.pass(images, i);
                    CHECK(pass.images.first == end);
                    CHECK(pass.last == (i + 1 == passes.passes()));
                    end += pass.images.count;
                    global += rank == 0 ? pass.global_images : 0;
                    of_each = pass.global_images;
                }
                of_all_ranks += end;
            }
            CHECK(of_all_ranks == images);
            CHECK((shards > 0 ? of_each : global) == images);
        }
    }
}
