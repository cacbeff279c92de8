#include "train/micro_batches.hpp"

#include <algorithm>
#include <utility>

#include "base/sum_tree.hpp"

namespace gyre::train {

MicroBatches::MicroBatches(Backend& backend, std::span<float> gradients, std::span<float> state,
                           const Sharding& sharding, int accumulate, const Rounding& rounding)
    : backend_(backend),
      gradients_(gradients),
      state_(state),
      sharding_(sharding),
      tree_(sharding.shards > 0),
      passes_(tree_ ? sharding.shard_count(sharding.rank) : accumulate),
      rounding_(tree_ ? rounding : Rounding()),
      first_state_(backend, tree_ && passes_ > 1 ? std::ssize(state) : 0) {
    std::size_t most_waiting = !tree_ && passes_ > 1 ? 1 : 0;
    if (tree_) {
        const int first = sharding.own_shards().first;
        std::vector<std::pair<TreeNode, int>> waiting;
        for (int shard = first; shard < first + passes_; ++shard) {
            Merge& merge = merges_.emplace_back(Merge{.waiting = waiting.size()});
            most_waiting = std::max(most_waiting, waiting.size());
            push_node(waiting, {shard, shard + 1}, 0, sharding.shards,
                      [&](int, int) { ++merge.merged; });
        }
    }
    for (std::size_t i = 0; i < most_waiting; ++i) {
        partial_sums_.emplace_back(backend, std::ssize(gradients));
    }
    if (tree_ && rounding_.type == DataType::float32) {
        const TreeNode own = sharding.own_shards();
        for (const TreeNode& node : tree_nodes(own.first, own.last, sharding.shards)) {
            const bool last = node.last == own.last;
            sums_.push_back({node.first - own.first, node.last - own.first,
                             last ? gradients.data() : partial_sums_[sums_.size()].get()});
        }
    }
}

std::vector<const float*> MicroBatches::earlier_nodes() const {
    std::vector<const float*> nodes;
    for (std::size_t i = 0; tree_ && i < merges_.back().waiting - merges_.back().merged; ++i) {
        nodes.push_back(partial_sums_[i].get());
    }
    return nodes;
}

MicroBatches::Pass MicroBatches::pass(std::int64_t step_images, int index) const {
    return {
        .index = index,
        .last = index + 1 == passes_,
        .images = sharding_.part(step_images, index, passes_),
        // Shards that meet in an operation do so all.
        .global_images = tree_ ? step_images : sharding_.part_images(step_images, index, passes_)};
}

void MicroBatches::begin_step() {
    added_from_ = std::ssize(gradients_);
    if (!tree_ && !partial_sums_.empty()) {  // a running sum begins at +0
        backend_.fill_zero(partial_sums_[0].get(), partial_sums_[0].bytes());
    }
}

void MicroBatches::add(const float* sum, std::int64_t begin, std::int64_t end) {
    backend_.add(end - begin, sum + begin, gradients_.data() + begin);
    round(begin, end);
}

void MicroBatches::round(std::int64_t begin, std::int64_t end) {
    float* const to = gradients_.data() + begin;
    const std::int64_t rounded = std::min(end, rounding_.elems) - begin;
    if (rounding_.type != DataType::float32 && rounded > 0) {
        backend_.round_to(rounding_.type, rounded, to, to);
    }
}

void MicroBatches::add_earlier(std::int64_t begin) {
    const Merge last = tree_ ? merges_.back() : Merge{partial_sums_.size(), partial_sums_.size()};
    round(begin, added_from_);
    for (std::size_t i = 0; i < last.merged; ++i) {
        add(partial_sums_[last.waiting - 1 - i].get(), begin, added_from_);
    }
    added_from_ = begin;
}

void MicroBatches::end_pass(const Pass& pass) {
    if (first_state_.elems() > 0) {
        // Running statistics are those of shard 0, which rank 0 has on any number of ranks.
        if (pass.index == 0) {
            backend_.copy(first_state_.get(), state_.data(), first_state_.bytes());
        } else if (pass.last) {
            backend_.copy(state_.data(), first_state_.get(), first_state_.bytes());
        }
    }
    if (!pass.last) {
        keep(pass.index, 0);
    }
}

void MicroBatches::keep(int pass, std::int64_t begin) {
    const std::int64_t elems = added_from_ - begin;
    if (!tree_) {
        backend_.add(elems, gradients_.data() + begin, partial_sums_[0].get() + begin);
        return;
    }
    const Merge& merge = merges_[static_cast<std::size_t>(pass)];
    std::size_t waiting = merge.waiting;
    round(begin, added_from_);
    for (std::size_t i = 0; i < merge.merged; ++i) {
        add(partial_sums_[--waiting].get(), begin, added_from_);
    }
    backend_.copy(partial_sums_[waiting].get() + begin, gradients_.data() + begin,
                  static_cast<std::size_t>(elems) * sizeof(float));
}

}  // namespace gyre::train
