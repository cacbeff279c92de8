// Order and sharding of an epoch: every image exactly once, for every number of ranks.
#include <algorithm>
#include <cmath>
#include <map>
#include <set>

#include "base/epoch_order.hpp"
#include "data/sampler.hpp"
#include "tests/support/catch.hpp"

using namespace gyre;
using namespace gyre::data;

namespace {

// Statistics of the positions and images over many epochs of one seed.
struct Orders {
    Orders(std::int64_t count, std::uint64_t seed, std::uint32_t epochs) {
        const auto n = static_cast<std::size_t>(count);
        at.resize(n * n);
        difference.resize(n);
        for (std::uint32_t epoch = 1; epoch <= epochs; ++epoch) {
            const auto order = epoch_order(count, seed, epoch, true);
            int fixed_now = 0;
            for (std::size_t i = 0; i < n; ++i) {
                const auto image = static_cast<std::size_t>(order[i]);
                ++at[i * n + image];
                fixed_now += image == i;
                const auto next = static_cast<std::size_t>(order[(i + 1) % n]);
                ++difference[(next + n - image) % n];
                descents += next < image;
                serial += (static_cast<double>(image) - 0.5 * double(n - 1)) *
                          (static_cast<double>(next) - 0.5 * double(n - 1));
            }
            fixed += fixed_now;
            fixed_squared += fixed_now * fixed_now;
        }
    }
    std::vector<int> at;          // [position][image]
    std::vector<int> difference;  // [next image - image, modulo count], on a ring of positions
    double fixed = 0.0, fixed_squared = 0.0;  // images at their own position
    double serial = 0.0;                      // sum of products of neighbours' deviations
    double descents = 0.0;
};

// Returns by how many standard deviations chi squared exceeds its expectation.
double excess(const int* begin, const int* end, double expected, double freedom) {
    double sum = 0.0;
    for (; begin != end; ++begin) {
        sum += (*begin - expected) * (*begin - expected) / expected;
    }
    return (sum - freedom) / std::sqrt(2.0 * freedom);
}

}  // namespace

TEST_CASE("an epoch's order is a permutation that depends only on seed, epoch and count") {
    for (const std::int64_t count :
         {0,    1,    2,    3,    4,    5,     7,     8,     9,     10,    63,
          64,   65,   66,   127,  128,  129,   255,   256,   257,   900,   1023,
          1024, 1025, 4095, 4096, 4097, 32769, 60000, 65535, 65536, 65537, 100'000}) {
        INFO(count << " images");
        const auto order = epoch_order(count, 1, 1, true);
        auto sorted = order;
        std::sort(sorted.begin(), sorted.end());
        CHECK(sorted == epoch_order(count, 1, 1, false));
        CHECK(order == epoch_order(count, 1, 1, true));
        if (count > 10) {
            CHECK(order != sorted);
            CHECK(order != epoch_order(count, 1, 2, true));
            CHECK(order != epoch_order(count, 2, 1, true));
            CHECK(order != epoch_order(count, std::uint64_t{1} << 32 | 1, 1, true));
        }
    }
    CHECK(epoch_order(4, 1, 1, false) == std::vector<std::int32_t>{0, 1, 2, 3});
}

// The expected orders were computed by a separate program.
TEST_CASE("the order is the documented one, also if only one position is computed") {
    const auto begins_with = [](std::int64_t count, std::uint64_t seed, std::uint32_t epoch,
                                const std::vector<std::int32_t>& expected) {
        const EpochOrder order(seed, count, true);
        std::uint32_t keys[EpochOrder::kRounds];
        for (int group = 0; group < EpochOrder::kKeyGroups; ++group) {
            order.write_keys(epoch, group, keys);
        }
        std::vector<std::int32_t> found;
        for (std::uint32_t at = 0; at < expected.size(); ++at) {
            found.push_back(static_cast<std::int32_t>(order.image(epoch, keys, at)));
        }
        CHECK(found == expected);
        auto all = epoch_order(count, seed, epoch, true);
        all.resize(expected.size());
        CHECK(all == expected);
    };
    begins_with(7, 3, 2, {6, 5, 1, 3, 2, 4, 0});
    begins_with(64, 1, 1, {52, 12, 47, 33, 9, 43, 22});
    begins_with(65, 1, 1, {6, 33, 12, 50, 29, 44, 7});
    begins_with(100, (std::uint64_t{1} << 40) + 5, 3, {30, 17, 69, 4, 20, 71, 48});
    begins_with(60000, 1, 1, {5486, 44625, 26257, 32574, 10934, 2933, 15886});
    begins_with(65536, 9, 2, {10535, 20777, 41515, 55304, 33572, 37195, 36477});
}

TEST_CASE("for few images every order is equally likely") {
    constexpr int kEpochs = 20000;
    int orders = 1;
    for (int count = 2; count <= 5; ++count) {
        orders *= count;
        std::map<std::vector<std::int32_t>, int> times_of_epochs, times_of_seeds;
        for (std::uint32_t i = 1; i <= kEpochs; ++i) {
            ++times_of_epochs[epoch_order(count, 7, i, true)];
            ++times_of_seeds[epoch_order(count, i, 1, true)];
        }
        for (const auto& times : {times_of_epochs, times_of_seeds}) {
            INFO(count << " images");
            REQUIRE(int(times.size()) == orders);
            std::vector<int> counts;
            for (const auto& [order, hits] : times) {
                counts.push_back(hits);
            }
            CHECK(std::abs(excess(counts.data(), counts.data() + orders,
                                  double{kEpochs} / double(orders), double(orders - 1))) < 4.0);
        }
    }
}

// Bounds are four standard deviations or more.
TEST_CASE("the order is uniform: every position and every neighbour of an image is as likely") {
    for (const std::int64_t count : {6, 7, 8, 10, 16, 33, 64, 65, 96, 128, 129, 256, 257}) {
        for (const std::uint64_t seed : {1, 7}) {
            constexpr int kEpochs = 3000;
            INFO(count << " images, seed " << seed);
            const Orders found(count, seed, kEpochs);
            const auto n = static_cast<double>(count);
            CHECK(std::abs(excess(found.at.data(), found.at.data() + found.at.size(), kEpochs / n,
                                  (n - 1) * (n - 1))) < 4.0);
            CHECK(found.difference[0] == 0);
            CHECK(std::abs(excess(found.difference.data() + 1,
                                  found.difference.data() + found.difference.size(),
                                  kEpochs * n / (n - 1), n - 2)) < 4.0);
            // The number of fixed points has mean 1 and variance 1; its square has variance 11.
            CHECK(std::abs(found.fixed / kEpochs - 1.0) < 4.0 / std::sqrt(kEpochs));
            CHECK(std::abs(found.fixed_squared / kEpochs - 2.0) < 4.0 * std::sqrt(11.0 / kEpochs));
            // In a ring of n neighbours the variance of an order's descents is (n + 1) / 12.
            CHECK(std::abs(found.descents / kEpochs - n / 2) <
                  4.0 * std::sqrt((n + 1) / 12 / kEpochs));
            // A pair's correlation is -1 / (n - 1); the sum over an order has variance about n.
            const double variance = (n * n - 1) / 12;
            CHECK(std::abs(found.serial / variance / kEpochs + n / (n - 1)) <
                  4.0 * std::sqrt(n / kEpochs));
        }
    }
}

TEST_CASE("the order of a data set has no trace of the file's order, nor of another epoch's") {
    constexpr std::int64_t kCount = 60000;
    constexpr double kCountReal = 60000.0;
    constexpr int kEpochs = 20;
    auto before = epoch_order(kCount, 1, 0, false);
    for (std::uint32_t epoch = 1; epoch <= kEpochs; ++epoch) {
        INFO("epoch " << epoch);
        const auto order = epoch_order(kCount, 1, epoch, true);
        // Correlation with the previous epoch, with itself a lag later, and images of one batch in
        // sixteenths of the file: the standard deviation is 1 / sqrt(count) each.
        const auto correlation = [&](const std::vector<std::int32_t>& a,
                                     const std::vector<std::int32_t>& b, std::size_t lag) {
            const double mean = 0.5 * (kCountReal - 1);
            double sum = 0.0;
            for (std::size_t i = 0; i < a.size(); ++i) {
                sum += (a[i] - mean) * (b[(i + lag) % b.size()] - mean);
            }
            return sum / (kCountReal * (kCountReal * kCountReal - 1) / 12);
        };
        const double bound = 4.5 / std::sqrt(kCountReal);
        CHECK(std::abs(correlation(before, order, 0)) < bound);
        CHECK(std::abs(correlation(before, order, 1)) < bound);
        for (const std::size_t lag : {1u, 2u, 3u, 64u, 256u, 512u, 32768u}) {
            CHECK(std::abs(correlation(order, order, lag)) < bound);
        }
        std::vector<int> sixteenths(16 * 937);
        for (std::size_t i = 0; i < 64 * 937; ++i) {
            ++sixteenths[i / 64 * 16 + static_cast<std::size_t>(order[i]) / 3750];
        }
        CHECK(std::abs(excess(sixteenths.data(), sixteenths.data() + sixteenths.size(), 4.0,
                              936.0 * 15.0)) < 4.5);
        before = order;
    }
}

TEST_CASE("every image is trained on exactly once per epoch, whatever the ranks and batches") {
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

TEST_CASE("the ranks' parts of a step together are the step of a single rank") {
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

TEST_CASE("part_images sums a part over all ranks, however uneven their shares") {
    for (const int ranks : {1, 2, 3, 7}) {
        for (const std::int64_t images : {1, 5, 10, 24}) {
            for (const int parts : {1, 2, 3, 5}) {
                for (int part = 0; part < parts; ++part) {
                    std::int64_t sum = 0;
                    for (int rank = 0; rank < ranks; ++rank) {
                        sum += Sharding{100, 24, rank, ranks}.part(images, part, parts).count;
                    }
                    INFO(images << " images of " << ranks << " ranks, part " << part << " of "
                                << parts);
                    CHECK(Sharding{100, 24, 0, ranks}.part_images(images, part, parts) == sum);
                }
            }
        }
    }
}

TEST_CASE("a step's shards are the same on any number of ranks") {
    for (const std::int64_t images : {1, 6, 23, 24}) {
        const Sharding one{100, 24, 0, 1, 8};
        for (const int ranks : {1, 2, 4, 8}) {
            for (int shard = 0; shard < 8; ++shard) {
                const int own = 8 / ranks;
                const Sharding sharding{100, 24, shard / own, ranks, 8};
                const Range part = sharding.part(images, shard % own, own);
                const Range expected = one.part(images, shard, 8);
                CHECK(sharding.share(images).first + part.first == expected.first);
                CHECK(part.count == expected.count);
                CHECK(sharding.share(images).count <= sharding.most_local());
            }
        }
    }
}

TEST_CASE("sizes of passes: the largest, and those of at least every tenth pass") {
    using Sizes = std::vector<int>;
    CHECK(Sharding{60'000, 64, 0, 1}.sizes() == Sizes{64});  // 937 of 64, one of 32
    CHECK(Sharding{10'000, 1000, 0, 1}.sizes() == Sizes{1000});
    CHECK(Sharding{2500, 1000, 0, 1}.sizes() == Sizes{1000, 500});
    CHECK(Sharding{70, 100, 0, 1}.sizes() == Sizes{70});
    // 3 ranks share 100 images as 34, 33 and 33; 34 images in 4 parts are 9, 9, 8 and 8.
    CHECK(Sharding{60'000, 100, 0, 3}.sizes() == Sizes{34});
    CHECK(Sharding{60'000, 100, 2, 3}.sizes() == Sizes{33});
    CHECK(Sharding{60'000, 100, 0, 3}.sizes(4) == Sizes{9, 8});
    CHECK(Sharding{60'000, 20, 0, 1}.sizes(19) == Sizes{2, 1});  // one part of 19 is larger
    CHECK(Sharding{3, 3, 4, 7}.sizes().empty());
}
