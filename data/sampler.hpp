// Who trains on which images when: the sharding of an epoch over the ranks.
#pragma once

#include <cstdint>
#include <vector>

namespace gyre::data {

// The order in which an epoch (from 1) goes through `count` images: EpochOrder for all positions.
// shuffle = false gives 0, 1, 2, ...
std::vector<std::int32_t> epoch_order(std::int64_t count, std::uint64_t seed, std::uint32_t epoch,
                                      bool shuffle);

// Part of a sequence: [first, first + count).
struct Range {
    std::int64_t first = 0;
    std::int64_t count = 0;
};

// Divides [0, total) among `ranks` as evenly as possible; the first ones get one more.
Range rank_share(std::int64_t total, int rank, int ranks);

// Step s of an epoch takes the next global_batch images of its order (the last step what is left),
// and each rank a contiguous, near-equal part of them, possibly none. All ranks take all steps.
// With shards a step is divided into so many parts, as evenly, and each rank has shards / ranks of
// them, one after another.
struct Sharding {
    std::int64_t images = 0;
    std::int64_t global_batch = 1;
    int rank = 0;
    int ranks = 1;
    int shards = 0;  // a multiple of the ranks; 0: a rank divides its own part, if at all

    std::int64_t steps() const { return (images + global_batch - 1) / global_batch; }
    Range global(std::int64_t step) const;  // positions in the order, of all ranks
    Range local(std::int64_t step) const;   // of this rank
    std::int64_t most_local() const { return share(global_batch, 0).count; }
    // Of a step's images those of this rank, and of these, counted from their first, those of its
    // pass number `part` of `parts`; with shards these are shards / ranks.
    Range share(std::int64_t step_images) const { return share(step_images, rank); }
    Range part(std::int64_t step_images, int part, int parts) const;
    // Images of all ranks' passes number `part` of `parts`, where a step has so many.
    std::int64_t part_images(std::int64_t step_images, int part, int parts) const;
    // Images of this rank's passes, `parts` to a step: the largest size, and those that at least
    // every tenth pass of an epoch has; descending.
    std::vector<int> sizes(int parts = 1) const;

 private:
    Range share(std::int64_t step_images, int of_rank) const;
};

}  // namespace gyre::data
