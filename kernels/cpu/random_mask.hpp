// Dropout's random numbers: an element is kept if its word >= probability * 2^32, and is then
// scaled by 1 / (1 - probability). They are keyed by (seed, layer, epoch, image, element), so every
// pass draws the same numbers.
#pragma once

#include <algorithm>
#include <cstdint>

#include "base/philox.hpp"
#include "kernels/cpu/simd.hpp"
#include "kernels/ops/dropout.hpp"
#include "kernels/ops/op.hpp"

namespace gyre::cpu {

class RandomMask {
 public:
    RandomMask(float probability, std::uint32_t stream)
        : stream_(stream),
          largest_dropped_(largest_dropped_word(probability)),
          keep_(kept_factor(probability)) {}

    // The factors of words [4 * group, 4 * group + 4) for one block of a batch's images.
    class Block {
     public:
        Block(const RandomMask& mask, const Batch& batch, int block)
            : mask_(mask),
              stream_{batch.seed, RandomPurpose::dropout, mask.stream_,
                      batch.epoch != nullptr ? *batch.epoch : 0} {
            const int lanes = std::min(kLanes, batch.n - block * kLanes);
            for (int lane = 0; lane < lanes; ++lane) {
                sample_[lane] = static_cast<std::uint32_t>(batch.samples[block * kLanes + lane]);
            }
        }
        void draw(std::uint32_t group, float (&factor)[4][kLanes]) const {
            const RandomStream stream = stream_;
            const std::uint32_t largest_dropped = mask_.largest_dropped_;
            const float keep = mask_.keep_;
            std::uint32_t word_of[4][kLanes];
            for (int lane = 0; lane < kLanes; ++lane) {  // all lanes, so that the loop vectorises
                const Philox4 random = stream.group(sample_[lane], group);
                for (int i = 0; i < 4; ++i) {
                    word_of[i][lane] = random.word[i];
                }
            }
            for (int i = 0; i < 4; ++i) {
                for (int lane = 0; lane < kLanes; ++lane) {
                    factor[i][lane] = word_of[i][lane] > largest_dropped ? keep : 0.0f;
                }
            }
        }

     private:
        const RandomMask& mask_;
        const RandomStream stream_;
        std::uint32_t sample_[kLanes] = {};
    };

 private:
    std::uint32_t stream_, largest_dropped_;
    float keep_;
};

}  // namespace gyre::cpu
