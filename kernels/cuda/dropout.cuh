// Dropout's factors from its random words (base/philox.hpp).
#pragma once

#include "base/philox.hpp"
#include "kernels/cuda/simt.hpp"
#include "kernels/ops/batch.hpp"
#include "kernels/ops/dropout.hpp"

namespace gyre::SIMT_NAMESPACE {

// The factors of words [4 * group, 4 * group + 4) of an image: `keep` if the
// word > largest_dropped, else 0.
__device__ __forceinline__ float4 dropout_factors(const RandomStream& stream, std::uint32_t sample,
                                                  std::uint32_t group,
                                                  std::uint32_t largest_dropped, float keep) {
    const Philox4 random = stream.group(sample, group);
    const auto factor = [&](std::uint32_t word) { return word > largest_dropped ? keep : 0.0f; };
    return make_float4(factor(random.word[0]), factor(random.word[1]), factor(random.word[2]),
                       factor(random.word[3]));
}

// The same for any image of a batch.
struct BatchDropout {
    RandomStream stream;
    const std::uint32_t* epoch;  // null: 0
    const std::int32_t* samples;
    std::uint32_t largest_dropped;
    float keep;

    __device__ __forceinline__ float4 factors(std::int64_t image, std::uint32_t group) const {
        RandomStream of_epoch = stream;
        if (epoch != nullptr) {
            of_epoch.epoch = *epoch;
        }
        return dropout_factors(of_epoch, static_cast<std::uint32_t>(samples[image]), group,
                               largest_dropped, keep);
    }
};
inline BatchDropout batch_dropout(const Batch& batch, std::uint32_t stream, float probability) {
    return {{batch.seed, RandomPurpose::dropout, stream, 0},
            batch.epoch,
            batch.samples,
            largest_dropped_word(probability),
            kept_factor(probability)};
}

__device__ __forceinline__ float select(const float4& of, std::uint32_t i) {
    const float low = i == 0 ? of.x : of.y, high = i == 2 ? of.z : of.w;
    return i < 2 ? low : high;
}

}  // namespace gyre::SIMT_NAMESPACE
