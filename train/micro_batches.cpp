#include "train/micro_batches.hpp"

#include <bit>

namespace gyre::train {

MicroBatches::MicroBatches(Backend& backend, std::span<float> gradients, std::span<float> state,
                           const Sharding& sharding, int accumulate)
    : backend_(backend),
      gradients_(gradients),
      state_(state),
      sharding_(sharding),
      tree_(sharding.shards > 0),
      passes_(tree_ ? sharding.shards / sharding.ranks : accumulate),
      first_state_(backend, tree_ && passes_ > 1 ? std::ssize(state) : 0) {
    for (int passes = passes_; passes > 1; passes = tree_ ? passes / 2 : 1) {
        partial_sums_.emplace_back(backend, std::ssize(gradients));
    }
}

MicroBatches::Pass MicroBatches::pass(std::int64_t step_images, int index) const {
    return {.index = index,
            .last = index + 1 == passes_,
            .images = sharding_.part(step_images, index, passes_),
            // The statistics of a shard are its own.
            .global_images = tree_ ? 0 : sharding_.part_images(step_images, index, passes_)};
}

void MicroBatches::begin_step() {
    added_from_ = std::ssize(gradients_);
    if (!tree_ && !partial_sums_.empty()) {  // a running sum begins at +0
        backend_.fill_zero(partial_sums_[0].get(), partial_sums_[0].bytes());
    }
}

void MicroBatches::add_earlier(std::int64_t begin) {
    for (const DeviceBuffer<float>& sum : partial_sums_) {
        backend_.add(added_from_ - begin, sum.get() + begin, gradients_.data() + begin);
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
    if (pass.last) {
        return;
    }
    if (!tree_) {
        backend_.add(std::ssize(gradients_), gradients_.data(), partial_sums_[0].get());
        return;
    }
    // Neighbours that wait are carried on to the next level, as in counting.
    const auto level = static_cast<std::size_t>(std::countr_one(static_cast<unsigned>(pass.index)));
    for (std::size_t i = 0; i < level; ++i) {
        backend_.add(std::ssize(gradients_), partial_sums_[i].get(), gradients_.data());
    }
    backend_.copy(partial_sums_[level].get(), gradients_.data(), partial_sums_[level].bytes());
}

}  // namespace gyre::train
