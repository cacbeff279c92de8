// What dropout multiplies with, by its random words (base/philox.hpp).
#pragma once

#include "kernels/base/philox.hpp"
#include "kernels/cuda/simt.hpp"

namespace gyre::SIMT_NAMESPACE {

// Those of words 4 group ... 4 group + 3 of an image: keep where the word > largest_dropped, else
// 0.
__device__ __forceinline__ float4 dropout_factors(const RandomStream& stream, std::uint32_t sample,
                                                  std::uint32_t group,
                                                  std::uint32_t largest_dropped, float keep) {
    const Philox4 random = stream.group(sample, group);
    const auto factor = [&](std::uint32_t word) { return word > largest_dropped ? keep : 0.0f; };
    return make_float4(factor(random.word[0]), factor(random.word[1]), factor(random.word[2]),
                       factor(random.word[3]));
}

__device__ __forceinline__ float select(const float4& of, std::uint32_t i) {
    const float low = i == 0 ? of.x : of.y, high = i == 2 ? of.z : of.w;
    return i < 2 ? low : high;
}

}  // namespace gyre::SIMT_NAMESPACE
