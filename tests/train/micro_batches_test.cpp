// The sum of several passes' gradients, against sums by hand in the same order.
#include "train/micro_batches.hpp"

#include <bit>
#include <cmath>
#include <cstdint>
#include <vector>

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

Gradients tree_sum(int first, int count) {
    return count == 1 ? gradients_of(first)
                      : sum(tree_sum(first, count / 2), tree_sum(first + count / 2, count / 2));
}

// A step's result on the rank, whose passes have the gradients and the state of their numbers in
// the global batch.
struct Step {
    Step(const Sharding& sharding, int accumulate) {
        const auto backend = make_cpu_backend(1);
        const DeviceBuffer<float> gradients(*backend, kElems), state(*backend, 1);
        MicroBatches passes(*backend, {gradients.get(), kElems}, {state.get(), 1}, sharding,
                            accumulate);
        for (int repeat = 0; repeat < 2; ++repeat) {  // the second finds what the first has left
            passes.begin_step();
            for (int i = 0; i < passes.passes(); ++i) {
                const int number = sharding.rank * passes.passes() + i;
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
        found.assign(gradients.get(), gradients.get() + kElems);
        state_left = *state.get();
    }
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
    CHECK(running_sum(4) != tree_sum(0, 4));
}

TEST_CASE("gradients of shards become a binary tree over all ranks'", "[micro_batches]") {
    for (const int shards : {1, 2, 8, 16}) {
        for (int ranks = 1; ranks <= shards; ranks *= 2) {
            INFO(shards << " shards, " << ranks << " ranks");
            std::vector<Gradients> sums;
            for (int rank = 0; rank < ranks; ++rank) {
                const Step step({.images = 100,
                                 .global_batch = 48,
                                 .rank = rank,
                                 .ranks = ranks,
                                 .shards = shards},
                                1);
                const int own = shards / ranks;
                CHECK(step.found == tree_sum(rank * own, own));
                // The state is that of the rank's first shard.
                CHECK(step.state_left == static_cast<float>(rank * own));
                sums.push_back(step.found);
            }
            for (; sums.size() > 1; sums.resize(sums.size() / 2)) {  // as the reduction has it
                for (std::size_t i = 0; 2 * i < sums.size(); ++i) {
                    sums[i] = sum(sums[2 * i], sums[2 * i + 1]);
                }
            }
            CHECK(sums[0] == tree_sum(0, shards));
        }
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
    for (const int shards : {0, 8}) {
        for (const std::int64_t images : {1, 5, 22}) {
            std::int64_t of_all_ranks = 0, global = 0;
            for (int rank = 0; rank < 2; ++rank) {
                INFO(shards << " shards, " << images << " images, rank " << rank);
                const Sharding sharding{100, 22, rank, 2, shards};
                const MicroBatches passes(*backend, {}, {}, sharding, 3);
                CHECK(passes.passes() == (shards > 0 ? 4 : 3));
                std::int64_t end = 0;
                for (int i = 0; i < passes.passes(); ++i) {
                    const MicroBatches::Pass pass = passes.pass(images, i);
                    CHECK(pass.images.first == end);
                    CHECK(pass.last == (i + 1 == passes.passes()));
                    end += pass.images.count;
                    global += rank == 0 ? pass.global_images : 0;
                }
                of_all_ranks += end;
            }
            CHECK(of_all_ranks == images);
            CHECK(global == (shards > 0 ? 0 : images));
        }
    }
}
