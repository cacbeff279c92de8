// Shards an epoch over the ranks: which rank trains on which images in which step.
#pragma once

#include <cstdint>
#include <vector>

#include "base/sum_tree.hpp"

namespace gyre::data {

// Returns the order in which an epoch (from 1) visits `count` images: EpochOrder at all positions.
// shuffle = false gives 0, 1, 2, ...
std::vector<std::int32_t> epoch_order(std::int64_t count, std::uint64_t seed, std::uint32_t epoch,
                                      bool shuffle);

// A part of a sequence: [first, first + count).
struct Range {
    std::int64_t first = 0;
    std::int64_t count = 0;
};

// Divides [0, total) among `ranks` as evenly as possible; the first ones get one more.
Range rank_share(std::int64_t total, int rank, int ranks);

// Each step of an epoch takes the next global_batch images of its order (the last step takes the
// rest), and each rank a contiguous, near-equal part of them, possibly empty. All ranks take part
// in all steps. With `shards`, a step is divided as evenly into that many parts, and each rank has
// a near-equal number of consecutive ones.
struct Sharding {
    std::int64_t images = 0;
    std::int64_t global_batch = 1;
    int rank = 0;
    int ranks = 1;
    int shards = 0;  // as many as ranks or more; 0: each rank divides only its own part, if at all

    std::int64_t steps() const { return (images + global_batch - 1) / global_batch; }
    Range global(std::int64_t step) const;  // positions in the order, of all ranks
    Range local(std::int64_t step) const;   // of this rank
    TreeNode shards_of(int of_rank) const;  // which ones a rank has
    TreeNode own_shards() const { return shards_of(rank); }
    int shard_count(int of_rank) const {
        return shards_of(of_rank).last - shards_of(of_rank).first;
    }
    std::int64_t most_local() const { return share(global_batch, 0).count; }
    // share(): this rank's images in a step. part(): those of its pass `part` of `parts`, relative
    // to its first; with shards, `parts` is the number of its own.
    Range share(std::int64_t step_images) const { return share(step_images, rank); }
    Range part(std::int64_t step_images, int part, int parts) const;
    // Images in pass `part` of `parts`, summed over all ranks, of a step with `step_images` images.
    std::int64_t part_images(std::int64_t step_images, int part, int parts) const;
    // Sizes in images of this rank's passes, `parts` per step: the largest, and those of at least
    // every tenth pass of an epoch; descending.
    std::vector<int> sizes(int parts = 1) const;

 private:
    Range share(std::int64_t step_images, int of_rank) const;
};

}  // namespace gyre::data
