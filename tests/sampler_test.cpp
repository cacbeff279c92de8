// Order and sharding of an epoch: every image exactly once, for every number of ranks.
#include <algorithm>
#include <set>

#include "data/sampler.hpp"
#include "tests/catch.hpp"

using namespace gyre;
using namespace gyre::data;

TEST_CASE("an epoch's order is a permutation that depends on seed and epoch alone") {
    for (const std::int64_t count : {1, 2, 3, 10, 900, 60000}) {
        const auto order = epoch_order(count, 1, 1, true);
        auto sorted = order;
        std::sort(sorted.begin(), sorted.end());
        CHECK(sorted == epoch_order(count, 1, 1, false));
        CHECK(order == epoch_order(count, 1, 1, true));
        if (count > 10) {
            CHECK(order != epoch_order(count, 1, 2, true));
            CHECK(order != epoch_order(count, 2, 1, true));
        }
    }
    CHECK(epoch_order(4, 1, 1, false) == std::vector<std::int32_t>{0, 1, 2, 3});
}

TEST_CASE("the order is uniform: every image is as likely at every place") {
    int at[5][5] = {};
    const int epochs = 20000;
    for (std::uint32_t epoch = 1; epoch <= epochs; ++epoch) {
        const auto order = epoch_order(5, 7, epoch, true);
        for (int place = 0; place < 5; ++place) {
            ++at[order[static_cast<std::size_t>(place)]][place];
        }
    }
    for (const auto& image : at) {
        for (const int hits : image) {
            // Expected 4000, standard deviation 57: five of them.
            CHECK(std::abs(hits - epochs / 5) < 283);
        }
    }
}

TEST_CASE("every image is trained on exactly once an epoch, whatever the ranks and batches") {
    for (const std::int64_t images : {1, 7, 10, 64, 100, 900}) {
        for (const std::int64_t global_batch : {1, 4, 60, 128, 1000}) {
            for (const int ranks : {1, 2, 3, 4, 7}) {
                INFO(images << " images, batch " << global_batch << ", " << ranks << " ranks");
                std::vector<int> seen(static_cast<std::size_t>(images));
                std::set<std::int64_t> step_counts;
                std::int64_t wrong_share = 0;
                for (int rank = 0; rank < ranks; ++rank) {
                    const Sharding sharding{images, global_batch, rank, ranks};
                    step_counts.insert(sharding.steps());
                    for (std::int64_t step = 0; step < sharding.steps(); ++step) {
                        const Range global = sharding.global(step), local = sharding.local(step);
                        wrong_share += local.first < global.first;
                        wrong_share += local.first + local.count > global.first + global.count;
                        wrong_share += local.count > sharding.most_local();
                        wrong_share += std::abs(local.count - global.count / ranks) > 1;
                        for (std::int64_t i = local.first; i < local.first + local.count; ++i) {
                            ++seen[static_cast<std::size_t>(i)];
                        }
                    }
                }
                CHECK(wrong_share == 0);
                CHECK(step_counts.size() == 1);
                CHECK(std::count(seen.begin(), seen.end(), 1) == images);
            }
        }
    }
}

TEST_CASE("the ranks' parts of a step together are the one rank's step") {
    const Sharding one{100, 24, 0, 1};
    for (std::int64_t step = 0; step < one.steps(); ++step) {
        std::int64_t next = one.local(step).first;
        for (int rank = 0; rank < 5; ++rank) {
            const Range part = Sharding{100, 24, rank, 5}.local(step);
            CHECK(part.first == next);
            next += part.count;
        }
        CHECK(next == one.local(step).first + one.local(step).count);
    }
}

TEST_CASE("sizes of passes: the largest, and those of at least every tenth pass") {
    using Sizes = std::vector<int>;
    CHECK(Sharding{60'000, 64, 0, 1}.sizes() == Sizes{64});  // 937 of 64, one of 32
    CHECK(Sharding{10'000, 1000, 0, 1}.sizes() == Sizes{1000});
    CHECK(Sharding{2500, 1000, 0, 1}.sizes() == Sizes{1000, 500});
    CHECK(Sharding{70, 100, 0, 1}.sizes() == Sizes{70});
    // 100 images of 3 ranks are 34, 33 and 33; 34 in 4 parts 9, 9, 8 and 8.
    CHECK(Sharding{60'000, 100, 0, 3}.sizes() == Sizes{34});
    CHECK(Sharding{60'000, 100, 2, 3}.sizes() == Sizes{33});
    CHECK(Sharding{60'000, 100, 0, 3}.sizes(4) == Sizes{9, 8});
    CHECK(Sharding{60'000, 20, 0, 1}.sizes(19) == Sizes{2, 1});  // one part of 19 is larger
    CHECK(Sharding{3, 3, 4, 7}.sizes().empty());
}
