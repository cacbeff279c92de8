// Philox 4x32-10, the counter-based generator of Salmon et al., "Parallel random numbers: as easy
// as 1, 2, 3", SC 2011. The same (key, counter) gives the same four words on every device, rank and
// thread, so masks, order and initial weights do not depend on how the work is divided.
#pragma once

#include <array>
#include <cstdint>

#if defined(__CUDACC__)
#define GYRE_HOST_DEVICE __host__ __device__
#else
#define GYRE_HOST_DEVICE
#endif

namespace gyre {

struct Philox4 {
    std::uint32_t word[4];
};

GYRE_HOST_DEVICE inline Philox4 philox4x32_10(std::uint64_t key, const Philox4& counter) {
    auto k0 = static_cast<std::uint32_t>(key);
    auto k1 = static_cast<std::uint32_t>(key >> 32);
    Philox4 c = counter;
    for (int round = 0; round < 10; ++round) {
        const std::uint64_t p0 = std::uint64_t{0xD2511F53u} * c.word[0];
        const std::uint64_t p1 = std::uint64_t{0xCD9E8D57u} * c.word[2];
        c = {{static_cast<std::uint32_t>(p1 >> 32) ^ c.word[1] ^ k0, static_cast<std::uint32_t>(p1),
              static_cast<std::uint32_t>(p0 >> 32) ^ c.word[3] ^ k1,
              static_cast<std::uint32_t>(p0)}};
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    return c;
}

// The use of a random stream; part of the counter, so that streams never overlap.
enum class RandomPurpose : std::uint32_t { init = 1, order = 2, dropout = 3, augment = 4 };

// Word `element` of the stream (seed, purpose, index, epoch, sample).
// index: the layer or parameter; sample: the image's index in the training set.
struct RandomStream {
    std::uint64_t seed = 0;
    RandomPurpose purpose = RandomPurpose::init;
    std::uint32_t index = 0;
    std::uint32_t epoch = 0;

    // The four consecutive words of elements [4 * group, 4 * group + 4).
    GYRE_HOST_DEVICE Philox4 group(std::uint32_t sample, std::uint32_t group) const {
        const std::uint32_t what = (static_cast<std::uint32_t>(purpose) << 24) | index;
        return philox4x32_10(seed, {{group, sample, epoch, what}});
    }
    GYRE_HOST_DEVICE std::uint32_t word(std::uint32_t sample, std::uint32_t element) const {
        return group(sample, element / 4).word[element % 4];
    }
};

// The top 24 bits as a float in [0, 1); every value is exactly representable.
GYRE_HOST_DEVICE inline float uniform01(std::uint32_t word) {
    return static_cast<float>(word >> 8) * 0x1p-24f;
}

}  // namespace gyre
