// The order in which an epoch visits the images: a random permutation of [0, count), evaluated at
// any single position as a pure function of (seed, epoch, count, position). It is therefore the
// same on every device and rank, and is never stored or sent.
//
// A bijection of the next power of two is applied until its result is in [0, count), at most twice
// on average (cycle walking: Black, Rogaway, "Ciphers with arbitrary finite domains", CT-RSA 2002).
// The bijection is VariablePhilox (Mitchell, Stokes, Frank, Holmes, "Bandwidth-optimal random
// shuffling for GPUs", ACM TOPC 2022): 24 Philox-like rounds on two halves, with one key per round
// from the epoch's random numbers. A small domain's keys have too few bits for all permutations, so
// up to kMostTraced images use Fisher-Yates (Durstenfeld 1964), exactly uniform: its swaps are
// traced back from the position, with `count` random numbers per position.
#pragma once

#include <bit>
#include <cstdint>

#include "base/philox.hpp"

namespace gyre {

class EpochOrder {
 public:
    static constexpr int kRounds = 24, kKeyGroups = kRounds / 4;
    static constexpr std::int64_t kMostTraced = 64;

    // count < 2^31. Without shuffling, position i holds image i.
    EpochOrder(std::uint64_t seed, std::int64_t count, bool shuffle)
        : seed_(seed),
          count_(static_cast<std::uint32_t>(count)),
          way_(!shuffle               ? Way::file
               : count <= kMostTraced ? Way::traced
                                      : Way::rounds) {
        const int bits = count > 1 ? std::bit_width(count_ - 1) : 0;
        low_bits_ = (bits + 1) / 2;
        high_bits_ = bits / 2;
    }

    std::int64_t count() const { return count_; }

    // Writes keys [4 * group, 4 * group + 4) of an epoch (counted from 1); group < kKeyGroups.
    GYRE_HOST_DEVICE void write_keys(std::uint32_t epoch, int group, std::uint32_t* keys) const {
        const Philox4 random = stream(epoch).group(kKeys, static_cast<std::uint32_t>(group));
        for (int i = 0; i < 4; ++i) {
            keys[4 * group + i] = random.word[i];
        }
    }

    // keys: [kRounds]; position < count.
    GYRE_HOST_DEVICE std::uint32_t image(std::uint32_t epoch, const std::uint32_t* keys,
                                         std::uint32_t position) const {
        if (way_ == Way::file) {
            return position;
        }
        if (way_ == Way::traced) {
            return traced(epoch, position);
        }
        std::uint32_t at[1] = {position};
        rounds(keys, at);
        return walked(keys, at[0]);
    }

    // The images at positions [first, first + kLanes), all of which must be < count. The loop over
    // lanes vectorises.
    template <int kLanes>
    void images(std::uint32_t epoch, const std::uint32_t* keys, std::uint32_t first,
                std::int32_t* images) const {
        std::uint32_t at[kLanes];
        for (int i = 0; i < kLanes; ++i) {
            at[i] = first + static_cast<std::uint32_t>(i);
        }
        if (way_ == Way::rounds) {
            rounds(keys, at);
        }
        for (int i = 0; i < kLanes; ++i) {
            images[i] = static_cast<std::int32_t>(way_ == Way::rounds ? walked(keys, at[i])
                                                                      : image(epoch, keys, at[i]));
        }
    }

 private:
    enum class Way : std::uint32_t { file, traced, rounds };
    // Sample numbers within the epoch's random stream.
    static constexpr std::uint32_t kSwaps = 0, kKeys = 1;

    GYRE_HOST_DEVICE RandomStream stream(std::uint32_t epoch) const {
        return {seed_, RandomPurpose::order, 0, epoch};
    }

    // Fisher-Yates swaps i = count - 1, ..., 1 with a position <= i; this undoes them in reverse.
    GYRE_HOST_DEVICE std::uint32_t traced(std::uint32_t epoch, std::uint32_t at) const {
        for (std::uint32_t i = 1; i < count_; ++i) {
            // 64 random bits modulo i + 1 <= 64: no value is favoured by more than 2^-58.
            const Philox4 random = stream(epoch).group(kSwaps, i);
            const std::uint64_t bits = std::uint64_t{random.word[1]} << 32 | random.word[0];
            const auto with = static_cast<std::uint32_t>(bits % (i + 1));
            at = at == i ? with : at == with ? i : at;
        }
        return at;
    }

    template <int kLanes>
    GYRE_HOST_DEVICE void rounds(const std::uint32_t* keys, std::uint32_t (&at)[kLanes]) const {
        constexpr std::uint64_t kFactor = 0xD2B74407B1CE6E93u;
        const std::uint32_t low_mask = (1u << low_bits_) - 1, high_mask = (1u << high_bits_) - 1;
        std::uint32_t high[kLanes], low[kLanes];
        for (int i = 0; i < kLanes; ++i) {
            high[i] = at[i] >> low_bits_;
            low[i] = at[i] & low_mask;
        }
        for (int round = 0; round < kRounds; ++round) {
            const std::uint32_t key = keys[round];
            for (int i = 0; i < kLanes; ++i) {
                const std::uint64_t product = kFactor * high[i];
                const auto upper = static_cast<std::uint32_t>(product >> 32);
                const std::uint32_t lower = static_cast<std::uint32_t>(product)
                                                << (low_bits_ - high_bits_) |
                                            low[i] >> high_bits_;
                high[i] = (upper ^ key ^ low[i]) & high_mask;
                low[i] = lower & low_mask;
            }
        }
        for (int i = 0; i < kLanes; ++i) {
            at[i] = high[i] << low_bits_ | low[i];
        }
    }

    GYRE_HOST_DEVICE std::uint32_t walked(const std::uint32_t* keys, std::uint32_t to) const {
        std::uint32_t at[1] = {to};
        while (at[0] >= count_) {
            rounds(keys, at);
        }
        return at[0];
    }

    std::uint64_t seed_;
    std::uint32_t count_;
    Way way_;
    int low_bits_ = 0, high_bits_ = 0;
};

}  // namespace gyre
