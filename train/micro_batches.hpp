// The passes that a rank divides its share of a step into, and the sum of their gradients.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "data/sampler.hpp"
#include "kernels/ops/backend.hpp"
#include "train/rooms.hpp"

namespace gyre::train {

// Every pass overwrites the gradients, so what the earlier ones left is kept in partial sums, which
// are added to the gradients of the last pass. The order of the additions follows the images: a
// running sum (accumulate) or, if the step is cut into shards, the tree of base/sum_tree.hpp over
// the shards of all ranks, as far as this rank's are nodes of it: the sums do not depend on how
// many shards each rank has.
class MicroBatches {
 public:
    struct Pass {
        int index = 0;
        bool last = false;
        Range images = {};               // counted from the first image of the rank's share
        std::int64_t global_images = 0;  // of this pass, over all ranks; 0: the rank's are meant
    };

    // With shards: the gradients [0, elems) of each pass, and each sum of two, are rounded to this
    // type, in which they travel, so that sums are the same on any number of ranks.
    struct Rounding {
        DataType type = DataType::float32;
        std::int64_t elems = 0;
    };

    // gradients, state: in the device's memory, and written by every pass. accumulate: the passes
    // of a rank if there are no shards. Both objects must outlive this one.
    MicroBatches(Backend& backend, std::span<float> gradients, std::span<float> state,
                 const Sharding& sharding, int accumulate, const Rounding& rounding);
    MicroBatches(Backend& backend, std::span<float> gradients, std::span<float> state,
                 const Sharding& sharding, int accumulate)
        : MicroBatches(backend, gradients, state, sharding, accumulate, Rounding()) {}

    int passes() const { return passes_; }
    // Pass `index` of a step that has this many images over all ranks.
    Pass pass(std::int64_t step_images, int index) const;

    void begin_step();
    // When the gradients at and after element `begin` of a pass that is not the last are final:
    // adds up those of the passes before it and keeps them. Called from the end of the gradients
    // on, and before add_earlier() of the same elements.
    void keep(int pass, std::int64_t begin);
    // Where passes that are leaves of one may add up their gradients at once, instead of the next
    // two functions; no nodes if they are rounded. Then, for each node of the net, summed().
    LeafSums sums() const { return {sums_, gradients_.data()}; }
    void summed(std::int64_t begin) { added_from_ = begin; }
    // In the last pass, when its gradients at and after element `begin` are final: adds those of
    // the earlier passes. Called from the end of the gradients on.
    void add_earlier(std::int64_t begin);
    void end_pass(const Pass& pass);
    // The nodes of the tree that the rank's shards add up to, in order, but the last, which becomes
    // the gradients: each [gradients], on the device, final when the last pass begins.
    std::vector<const float*> earlier_nodes() const;

 private:
    // Rounds the gradients [begin, end), as far as they travel rounded.
    void round(std::int64_t begin, std::int64_t end);
    // Adds the sum's [begin, end) to the gradients', and rounds what comes of it.
    void add(const float* sum, std::int64_t begin, std::int64_t end);

    Backend& backend_;
    const std::span<float> gradients_, state_;
    const Sharding sharding_;
    const bool tree_;
    const int passes_;
    const Rounding rounding_;
    // A pass's part in the tree: the number of sums that wait for their neighbours before it, and
    // how many of them, from the last one on, it adds to its own.
    struct Merge {
        std::size_t waiting = 0, merged = 0;
    };
    std::vector<Merge> merges_;
    std::vector<DeviceBuffer<float>> partial_sums_;
    std::vector<LeafSums::Node> sums_;
    DeviceBuffer<float> first_state_;  // as the first shard left it
    std::int64_t added_from_ = 0;      // gradients from here on have the earlier passes' added
};

}  // namespace gyre::train
