#include "data/sampler.hpp"

#include <algorithm>
#include <functional>
#include <map>
#include <utility>

#include "base/epoch_order.hpp"

namespace gyre::data {

std::vector<std::int32_t> epoch_order(std::int64_t count, std::uint64_t seed, std::uint32_t epoch,
                                      bool shuffle) {
    constexpr int kLanes = 64;
    const EpochOrder order(seed, count, shuffle);
    std::uint32_t keys[EpochOrder::kRounds];
    for (int group = 0; group < EpochOrder::kKeyGroups; ++group) {
        order.write_keys(epoch, group, keys);
    }
    std::vector<std::int32_t> images(static_cast<std::size_t>(count));
    std::size_t at = 0;
    for (; at + kLanes <= images.size(); at += kLanes) {
        order.images<kLanes>(epoch, keys, static_cast<std::uint32_t>(at), &images[at]);
    }
    for (; at < images.size(); ++at) {
        images[at] =
            static_cast<std::int32_t>(order.image(epoch, keys, static_cast<std::uint32_t>(at)));
    }
    return images;
}

Range rank_share(std::int64_t total, int rank, int ranks) {
    const std::int64_t least = total / ranks;
    const std::int64_t more = total % ranks;
    return {rank * least + std::min<std::int64_t>(rank, more), least + (rank < more ? 1 : 0)};
}

TreeNode Sharding::shards_of(int of_rank) const {
    const Range own = rank_share(shards, of_rank, ranks);
    return {static_cast<int>(own.first), static_cast<int>(own.first + own.count)};
}

Range Sharding::global(std::int64_t step) const {
    const std::int64_t first = step * global_batch;
    return {first, std::min(global_batch, images - first)};
}

Range Sharding::local(std::int64_t step) const {
    const Range all = global(step);
    const Range mine = share(all.count);
    return {all.first + mine.first, mine.count};
}

Range Sharding::share(std::int64_t step_images, int of_rank) const {
    if (shards == 0) {
        return rank_share(step_images, of_rank, ranks);
    }
    const TreeNode own = shards_of(of_rank);
    const Range first = rank_share(step_images, own.first, shards);
    const Range last = rank_share(step_images, own.last - 1, shards);
    return {first.first, last.first + last.count - first.first};
}

Range Sharding::part(std::int64_t step_images, int part, int parts) const {
    const Range mine = share(step_images);
    if (shards == 0) {
        return rank_share(mine.count, part, parts);
    }
    const Range shard = rank_share(step_images, own_shards().first + part, shards);
    return {shard.first - mine.first, shard.count};
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
            passes[this->part(global(step).count, part, parts).count] += times;
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
