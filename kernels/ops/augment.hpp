// Augmentation applied to training images as they are gathered, with new random moves for each
// image and epoch. The result is a pure function of (seed, epoch, index of the image in the data
// set) in integer arithmetic, so it is the same on every device and rank and in every batch.
#pragma once

#include <cstdint>

#include "base/philox.hpp"
#include "kernels/ops/shapes.hpp"

namespace gyre {

// Steps are applied in this order; 0 or false disables one.
struct AugmentSpec {
    int rotate = 0;      // about the centre, by up to N degrees: nearest pixel, or 0 outside
    int shift = 0;       // by up to N pixels on each axis; edge pixels are replicated
    int crop = 0;        // as shift, with zero padding (RandomCrop(padding=N))
    bool hflip = false;  // left to right, with probability 1/2
    int cutout = 0;  // an N x N square is set to the mean, 0 after normalisation, centred on any
                     // pixel of the image (DeVries, Taylor 2017)

    bool any() const { return rotate > 0 || shift > 0 || crop > 0 || hflip || cutout > 0; }
    bool operator==(const AugmentSpec&) const = default;
};

struct AugmentArgs {
    AugmentSpec spec;
    std::uint64_t seed = 0;
    const std::uint32_t* epoch = nullptr;  // on the device; null: no augmentation
};

// The random moves drawn for one image. No default initialisers: it is placed in shared memory.
struct DrawnAugment {
    static constexpr int kMean = -1, kBlack = -2;
    static constexpr std::int64_t kOne = std::int64_t{1} << 30;

    int height, width;
    int shift_y, shift_x, crop_y, crop_x, flip;
    int cut_y, cut_x, cut;      // the square's upper left corner and its size
    std::int64_t sine, cosine;  // times kOne

    // The index in the source plane of the pixel that moves to (y, x), or kMean or kBlack.
    GYRE_HOST_DEVICE int source(int y, int x) const {
        if (y >= cut_y && y < cut_y + cut && x >= cut_x && x < cut_x + cut) {
            return kMean;
        }
        x = flip != 0 ? width - 1 - x : x;
        y += crop_y;
        x += crop_x;
        if (outside(y, x)) {
            return kBlack;
        }
        y = clamped(y + shift_y, height - 1);
        x = clamped(x + shift_x, width - 1);
        if (cosine != kOne) {
            // Twice the distances from the centre, which are integers, rounded to nearest.
            const std::int64_t dy = 2 * y - (height - 1), dx = 2 * x - (width - 1);
            y = static_cast<int>((sine * dx + cosine * dy + height * kOne) >> 31);
            x = static_cast<int>((cosine * dx - sine * dy + width * kOne) >> 31);
            if (outside(y, x)) {
                return kBlack;
            }
        }
        return y * width + x;
    }

 private:
    GYRE_HOST_DEVICE bool outside(int y, int x) const {
        return y < 0 || y >= height || x < 0 || x >= width;
    }
    GYRE_HOST_DEVICE static int clamped(int value, int most) {
        return value < 0 ? 0 : value > most ? most : value;
    }
};

// Uniform in [0, count), up to a bias of count / 2^32.
GYRE_HOST_DEVICE inline int draw_below(std::uint32_t word, int count) {
    return static_cast<int>(std::uint64_t{word} * static_cast<std::uint64_t>(count) >> 32);
}

// Sets sine and cosine of steps / 128 degrees (at most 180), within 2^-25 of kOne.
GYRE_HOST_DEVICE inline void set_angle(DrawnAugment& drawn, int steps) {
    // Taylor series of a quarter of the angle, which is then doubled twice.
    constexpr std::int64_t kStep = 2398762259;  // pi / 180 / 128 / 4 * 2^46
    const std::int64_t x = steps * kStep >> 16, xx = x * x >> 30;
    std::int64_t s = -213044 + (2959 * xx >> 30);
    s = 8947849 + (s * xx >> 30);
    s = -178956971 + (s * xx >> 30);
    s = x * (DrawnAugment::kOne + (s * xx >> 30)) >> 30;
    std::int64_t c = 26631 - (296 * xx >> 30);
    c = -1491308 + (c * xx >> 30);
    c = 44739243 + (c * xx >> 30);
    c = -536870912 + (c * xx >> 30);
    c = DrawnAugment::kOne + (c * xx >> 30);
    for (int i = 0; i < 2; ++i) {
        const std::int64_t sine = 2 * s * c >> 30;
        c = (c * c - s * s) >> 30;
        s = sine;
    }
    drawn.sine = s;
    drawn.cosine = c;
}

// sample: the image's index in the data set.
GYRE_HOST_DEVICE inline DrawnAugment draw_augment(const AugmentArgs& args, const Shape& shape,
                                                  std::uint32_t sample) {
    const AugmentSpec& spec = args.spec;
    const RandomStream stream{args.seed, RandomPurpose::augment, 0, *args.epoch};
    const Philox4 moves = stream.group(sample, 0), others = stream.group(sample, 1);
    DrawnAugment drawn;
    drawn.height = shape.height;
    drawn.width = shape.width;
    drawn.shift_y = draw_below(moves.word[0], 2 * spec.shift + 1) - spec.shift;
    drawn.shift_x = draw_below(moves.word[1], 2 * spec.shift + 1) - spec.shift;
    drawn.crop_y = draw_below(moves.word[2], 2 * spec.crop + 1) - spec.crop;
    drawn.crop_x = draw_below(moves.word[3], 2 * spec.crop + 1) - spec.crop;
    drawn.flip = spec.hflip ? static_cast<int>(others.word[0] >> 31) : 0;
    drawn.cut = spec.cutout;
    drawn.cut_y = draw_below(others.word[1], shape.height) - spec.cutout / 2;
    drawn.cut_x = draw_below(others.word[2], shape.width) - spec.cutout / 2;
    drawn.sine = 0;
    drawn.cosine = DrawnAugment::kOne;
    if (spec.rotate > 0) {
        const int most = 128 * spec.rotate;
        set_angle(drawn, draw_below(others.word[3], 2 * most + 1) - most);
    }
    return drawn;
}

// The pixel for a result of source(): plane[source] * scale + shift.
GYRE_HOST_DEVICE inline float augmented_value(const std::uint8_t* plane, int source, float scale,
                                              float shift) {
    return source == DrawnAugment::kMean
               ? 0.0f
               : static_cast<float>(source == DrawnAugment::kBlack ? 0 : plane[source]) * scale +
                     shift;
}

}  // namespace gyre
