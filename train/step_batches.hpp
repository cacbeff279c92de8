// The batches of a training step, as whoever runs its passes gives them to the net.
#pragma once

#include <cstdint>

#include "data/sampler.hpp"
#include "kernels/ops/batch.hpp"
#include "kernels/ops/step.hpp"
#include "train/micro_batches.hpp"
#include "train/rooms.hpp"
#include "train/run_spec.hpp"

namespace gyre::train {

class StepBatches {
 public:
    // place: [1], on the device; of the step that comes next. ranks: adds up what batches share.
    StepBatches(const Sharding& sharding, const RunSpec& run, EpochPlace* place, RankSums* ranks)
        : sharding_(sharding),
          seed_(run.seed),
          order_(run.seed, sharding.images, run.batch.shuffle),
          place_(place),
          ranks_(ranks) {}

    // Finds the samples of this rank in a step of `step_images` images, which moves the place on.
    NextSamplesArgs next_samples(std::int64_t step_images) const {
        return {.order = order_,
                .place = place_,
                .step_images = sharding_.global_batch,
                .first = sharding_.share(step_images).first};
    }
    // The batch of a pass. samples: of the rank's share, on the device.
    Batch batch(const MicroBatches::Pass& pass, const std::int32_t* samples) const {
        const bool meets = pass.global_images > 0 && (sharding_.ranks > 1 || sharding_.shards > 0);
        return {.n = static_cast<int>(pass.images.count),
                .global_n = pass.global_images,
                .training = true,
                .samples = samples + pass.images.first,
                .seed = seed_,
                .epoch = &place_->epoch,
                .ranks = meets ? ranks_ : nullptr};
    }

 private:
    const Sharding sharding_;
    const std::uint64_t seed_;
    const EpochOrder order_;
    EpochPlace* const place_;
    RankSums* const ranks_;
};

}  // namespace gyre::train
