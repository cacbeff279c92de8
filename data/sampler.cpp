#include "data/sampler.hpp"

#include <algorithm>
#include <functional>
#include <map>
#include <numeric>
#include <utility>

#include "kernels/base/philox.hpp"

namespace gyre::data {

std::vector<std::int32_t> epoch_order(std::int64_t count, std::uint64_t seed, std::uint32_t epoch,
                                      bool shuffle) {
    std::vector<std::int32_t> order(static_cast<std::size_t>(count));
    std::iota(order.begin(), order.end(), 0);
    if (!shuffle) {
        return order;
    }
    const RandomStream stream{seed, RandomPurpose::order, 0, epoch};
    for (std::size_t i = order.size(); i-- > 1;) {
        // 64 random bits modulo i + 1 <= 2^31: no value is favoured by more than 2^-33.
        const Philox4 random = stream.group(0, static_cast<std::uint32_t>(i));
        const std::uint64_t bits = std::uint64_t{random.word[1]} << 32 | random.word[0];
        const std::uint64_t at = bits % (i + 1);
        std::swap(order[i], order[at]);
    }
    return order;
}

Range rank_share(std::int64_t total, int rank, int ranks) {
    const std::int64_t least = total / ranks;
    const std::int64_t more = total % ranks;
    return {rank * least + std::min<std::int64_t>(rank, more), least + (rank < more ? 1 : 0)};
}

Range Sharding::global(std::int64_t step) const {
    const std::int64_t first = step * global_batch;
    return {first, std::min(global_batch, images - first)};
}

Range Sharding::local(std::int64_t step) const {
    const Range all = global(step);
    const Range mine = rank_share(all.count, rank, ranks);
    return {all.first + mine.first, mine.count};
}

std::int64_t Sharding::part_images(std::int64_t step_images, int part, int parts) const {
    std::int64_t sum = 0;
    for (int r = 0; r < ranks; ++r) {
        sum += rank_share(rank_share(step_images, r, ranks).count, part, parts).count;
    }
    return sum;
}

std::vector<int> Sharding::sizes(int parts) const {
    std::map<std::int64_t, std::int64_t, std::greater<>> passes;  // by images
    const std::int64_t whole = images / global_batch;
    const auto add = [&](std::int64_t step, std::int64_t times) {
        for (int part = 0; part < parts; ++part) {
            passes[rank_share(local(step).count, part, parts).count] += times;
        }
    };
    add(0, whole);
    if (whole < steps()) {
        add(whole, 1);
    }
    std::vector<int> result;
    for (const auto& [size, times] : passes) {
        if (size > 0 && times > 0 && (result.empty() || 10 * times >= steps() * parts)) {
            result.push_back(static_cast<int>(size));
        }
    }
    return result;
}

}  // namespace gyre::data
