// Chooses the emulated thread that runs next.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <random>
#include <vector>

#include "kernels/emulation/emulator.hpp"
#include "kernels/emulation/warp.hpp"

namespace simt::emulator {

// By index if the seed is 0, otherwise random; see set_schedule().
class Schedule {
 public:
    explicit Schedule(std::uint64_t seed) : seed_(seed), random_(seed) {}

    void shuffle(std::vector<std::size_t>& order) {
        if (seed_ != 0) {
            std::shuffle(order.begin(), order.end(), random_);
        }
    }
    // Marks all lanes of `warps` warps as ready.
    void begin(unsigned warps) {
        warps_ = warps;
        warp_now_ = 0;
        std::fill_n(ready_.begin(), warps, 0xffffffffu);
        if (seed_ != 0) {
            // With uniform picks only, a warp seldom runs far ahead of the others.
            uniform_ = random_() % 4 == 0;
            warp_order_.resize(warps);
            std::iota(warp_order_.begin(), warp_order_.end(), 0u);
            std::shuffle(warp_order_.begin(), warp_order_.end(), random_);
        }
    }
    void make_ready(unsigned id) { ready_[id / kWarp] |= 1u << id % kWarp; }

    // Removes a thread from the ready ones and returns it; negative: none is ready.
    int pick() {
        if (seed_ == 0) {
            for (unsigned i = 0; i < warps_; ++i) {
                const unsigned w = warp_now_ + i < warps_ ? warp_now_ + i : warp_now_ + i - warps_;
                if (ready_[w] != 0) {
                    warp_now_ = w;
                    return take(w, static_cast<unsigned>(std::countr_zero(ready_[w])));
                }
            }
            return -1;
        }
        const unsigned start = uniform_ ? static_cast<unsigned>(random_() % warps_) : 0;
        for (unsigned i = 0; i < warps_; ++i) {
            const unsigned w = warp_order_[(start + i) % warps_];
            if (ready_[w] != 0) {
                const int turn = static_cast<int>(random_() % kWarp);
                const int lane = (std::countr_zero(std::rotr(ready_[w], turn)) + turn) % 32;
                return take(w, static_cast<unsigned>(lane));
            }
        }
        return -1;
    }

 private:
    int take(unsigned warp, unsigned lane) {
        ready_[warp] &= ~(1u << lane);
        return static_cast<int>(warp * kWarp + lane);
    }

    std::uint64_t seed_;
    std::mt19937_64 random_;
    unsigned warps_ = 0, warp_now_ = 0;
    bool uniform_ = false;
    std::array<std::uint32_t, kMostClusterThreads / kWarp> ready_{};  // lanes that are ready
    std::vector<unsigned> warp_order_;
};

}  // namespace simt::emulator
