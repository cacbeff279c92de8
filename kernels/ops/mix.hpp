// Mixing of two training images as they are gathered: mixup (Zhang et al., ICLR 2018) blends them,
// cutmix (Yun et al., ICCV 2019) puts a box of one into the other. The loss is that of both labels,
// in the same shares. As in augment.hpp, the draws follow from (seed, epoch, index of the image),
// in integer arithmetic.
#pragma once

#include <cstdint>

#include "kernels/ops/augment.hpp"

namespace gyre {

// No default initialisers: it is placed in shared memory.
struct DrawnMix {
    static constexpr int kWhole = 1 << 16;

    int partner;  // the other image's index, drawn from all training images
    int share;    // of the image itself, times kWhole
    Box box;      // of the other image; empty: the images are blended
};

// -log2((word + 1) / 2^32) * 2^16, within 1: one binary digit at a time, by squaring.
GYRE_HOST_DEVICE inline std::int64_t minus_log2_16(std::uint32_t word) {
    std::uint64_t mantissa = std::uint64_t{word} + 1;
    std::int64_t result = 0;
    for (; mantissa < std::uint64_t{1} << 32; mantissa <<= 1) {
        result += 1 << 16;
    }
    mantissa >>= 1;  // in [1, 2), times 2^31
    for (int bit = 15; bit >= 0; --bit) {
        mantissa = mantissa * mantissa >> 31;
        if (mantissa >= std::uint64_t{1} << 32) {
            mantissa >>= 1;
            result -= std::int64_t{1} << bit;
        }
    }
    return result;
}

// A number from Beta(alpha, alpha), times DrawnMix::kWhole, by Jöhnk's method (1964): x / (x + y)
// of the first pair x = u^(1 / alpha), y = v^(1 / alpha) with x + y <= 1. thousandths: alpha *
// 1000, up to 1000, so that at least every second pair is taken. Its random numbers begin at
// `group`.
GYRE_HOST_DEVICE inline int draw_beta(const RandomStream& stream, std::uint32_t sample,
                                      std::uint32_t group, int thousandths) {
    for (std::uint32_t attempt = 0; attempt < 32; ++attempt) {
        const Philox4 random = stream.group(sample, group + attempt);
        const std::int64_t x = minus_log2_16(random.word[0]) * 1000 / thousandths;
        const std::int64_t y = minus_log2_16(random.word[1]) * 1000 / thousandths;
        if (exp2_16(-x) + exp2_16(-y) <= DrawnMix::kWhole) {
            const std::int64_t ratio =
                exp2_16(x < y ? x - y : y - x);  // of the smaller to the other
            const auto smaller =
                static_cast<int>(ratio * DrawnMix::kWhole / (DrawnMix::kWhole + ratio));
            return x < y ? DrawnMix::kWhole - smaller : smaller;
        }
    }
    return DrawnMix::kWhole / 2;
}

// With both, each is as likely. The box is that of torchvision's CutMix: centred on any pixel,
// clipped to the image, of which the share follows.
GYRE_HOST_DEVICE inline DrawnMix draw_mix(const AugmentArgs& args, const Shape& shape,
                                          std::uint32_t sample) {
    const AugmentSpec& spec = args.spec;
    const RandomStream stream{args.seed, RandomPurpose::augment, 0, *args.epoch};
    const Philox4 random = stream.group(sample, 32);
    const bool cuts = spec.mixup == 0 || (spec.cutmix > 0 && random.word[1] >> 31 != 0);
    DrawnMix mix;
    mix.partner = draw_below(random.word[0], args.images);
    mix.share = draw_beta(stream, sample, 33, cuts ? spec.cutmix : spec.mixup);
    mix.box = {0, 0, 0, 0};
    if (cuts) {
        const auto half = [&](int side) {
            const std::int64_t rest = DrawnMix::kWhole - mix.share;
            return static_cast<int>(root_16((std::int64_t{side} * side * rest) << 14) >> 16);
        };
        const int half_height = half(shape.height), half_width = half(shape.width);
        const int y = draw_below(random.word[2], shape.height);
        const int x = draw_below(random.word[3], shape.width);
        const int top = y < half_height ? 0 : y - half_height;
        const int left = x < half_width ? 0 : x - half_width;
        const int bottom = y + half_height < shape.height ? y + half_height : shape.height;
        const int right = x + half_width < shape.width ? x + half_width : shape.width;
        mix.box = {top, left, bottom - top, right - left};
        const std::int64_t all = std::int64_t{shape.height} * shape.width;
        const std::int64_t cut = std::int64_t{mix.box.height} * mix.box.width;
        mix.share = DrawnMix::kWhole - static_cast<int>((cut * DrawnMix::kWhole + all / 2) / all);
        mix.box.height = cut == 0 ? 0 : mix.box.height;
    }
    return mix;
}

// The value at (y, x) from those of the image and of its partner.
GYRE_HOST_DEVICE inline float mixed_value(const DrawnMix& mix, int y, int x, float own,
                                          float others) {
    if (mix.box.height > 0) {
        return mix.box.contains(y, x) ? others : own;
    }
    const float share = static_cast<float>(mix.share) * 0x1p-16f;
    return share * own + (1.0f - share) * others;
}

}  // namespace gyre
