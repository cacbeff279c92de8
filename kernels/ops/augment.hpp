// Augmentation applied to training images as they are gathered, with new random moves for each
// image and epoch. The result is a pure function of (seed, epoch, index of the image in the data
// set) in integer arithmetic, so it is the same on every device and rank and in every batch.
#pragma once

#include <cstdint>

#include "base/philox.hpp"
#include "kernels/ops/shapes.hpp"

namespace gyre {

// When an image is flipped left to right: with probability 1/2; in turns, from epoch to epoch, of
// which the first is drawn so (Jordan 2024, "alternating flip"); or always, which is for
// evaluations.
enum class Flip { never, random, alternating, always };

// Steps are applied in this order; 0 or Flip::never disables one.
struct AugmentSpec {
    int resized_crop = 0;  // a random part of the image, of at least N % of its area, is resized to
                           // the size of the whole (torchvision's RandomResizedCrop)
    int rotate = 0;        // about the centre, by up to N degrees: nearest pixel, or 0 outside
    int shift = 0;         // by up to N pixels on each axis; edge pixels are replicated
    int crop = 0;          // as shift, with zero padding (RandomCrop(padding=N))
    Flip flip = Flip::never;
    int cutout = 0;   // an N x N square is set to the mean, 0 after normalisation, centred on any
                      // pixel of the image (DeVries, Taylor 2017)
    int erasing = 0;  // a random rectangle is set to the mean, with a probability of N %
                      // (torchvision's RandomErasing; Zhong et al. 2017)
    // An image is mixed with another one (mix.hpp), with Beta(alpha, alpha), alpha = N / 1000.
    int mixup = 0, cutmix = 0;

    bool any() const { return *this != AugmentSpec{}; }
    GYRE_HOST_DEVICE bool mixes() const { return mixup > 0 || cutmix > 0; }
    bool operator==(const AugmentSpec&) const = default;
};

struct AugmentArgs {
    AugmentSpec spec;
    std::uint64_t seed = 0;
    const std::uint32_t* epoch = nullptr;  // on the device; null: no augmentation
    int images = 0;                        // in the set, of which mix.hpp draws one
};

// Rows [y, y + height) and columns [x, x + width) of an image. No default initialisers: it is
// placed in shared memory.
struct Box {
    int y, x, height, width;

    GYRE_HOST_DEVICE bool contains(int row, int column) const {
        return row >= y && row < y + height && column >= x && column < x + width;
    }
};

// The random moves drawn for one image. No default initialisers: it is placed in shared memory.
struct DrawnAugment {
    static constexpr int kMean = -1, kBlack = -2;
    static constexpr std::int64_t kOne = std::int64_t{1} << 30;
    static constexpr std::int64_t kStep = std::int64_t{1} << 32;

    int height, width;
    int shift_y, shift_x, crop_y, crop_x, flip;
    Box cut, erased;              // set to the mean
    Box part;                     // resized to height x width, unless it has that size
    int unused;                   // so that no byte is undefined
    std::int64_t step_y, step_x;  // of the resized image in the part, times kStep
    std::int64_t sine, cosine;    // times kOne

    // The index in the resized plane of the pixel that moves to (y, x), or kMean or kBlack.
    GYRE_HOST_DEVICE int source(int y, int x) const {
        if (cut.contains(y, x) || erased.contains(y, x)) {
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

    // The pixel that source() has named.
    GYRE_HOST_DEVICE int pixel(const std::uint8_t* plane, int source) const {
        if (source == kBlack) {
            return 0;
        }
        if (part.height == height && part.width == width) {
            return plane[source];
        }
        const int row = source / width;
        const Tap y = tap(row, step_y, part.height);
        const Tap x = tap(source - row * width, step_x, part.width);
        const std::uint8_t* const from = plane + part.y * width + part.x;
        const std::uint8_t *above = from + y.low * width, *below = from + y.high * width;
        const int sum = (kWeights - y.weight) * x.between(above) + y.weight * x.between(below);
        return (sum + kWeights * kWeights / 2) / (kWeights * kWeights);
    }

 private:
    static constexpr int kWeights = 1 << 11;
    // A place between two neighbours, at weight / kWeights from the lower one.
    struct Tap {
        int low, high, weight;
        GYRE_HOST_DEVICE int between(const std::uint8_t* line) const {
            return (kWeights - weight) * line[low] + weight * line[high];
        }
    };
    // (i + 1/2) * step - 1/2, as torch.nn.functional.interpolate has it by default.
    GYRE_HOST_DEVICE static Tap tap(int i, std::int64_t step, int extent) {
        const std::int64_t exact = i * step + step / 2 - kStep / 2;
        const std::int64_t at =
            ((exact > 0 ? exact : 0) + kStep / kWeights / 2) / (kStep / kWeights);
        const int low = static_cast<int>(at / kWeights);
        return {low, low + 1 < extent ? low + 1 : low, static_cast<int>(at % kWeights)};
    }
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

// 2^(log / 2^16) * 2^16 for log < 2^17, or up to 2 less: a Taylor series between powers of two.
GYRE_HOST_DEVICE inline std::int64_t exp2_16(std::int64_t log) {
    constexpr std::int64_t kLog2 = 744261118;  // ln 2 * 2^30
    constexpr int kLeast = -32;
    if (log < kLeast * (1 << 16)) {
        return 0;
    }
    const int whole = static_cast<int>((log - kLeast * (1 << 16)) / (1 << 16)) + kLeast;
    const std::int64_t x = (log - whole * (1 << 16)) * kLog2 >> 16;
    std::int64_t sum = DrawnAugment::kOne;
    for (int i = 7; i > 0; --i) {
        sum = DrawnAugment::kOne + (x * sum >> 30) / i;
    }
    return sum >> (14 - whole);
}

// The square root of a number below 2^62, which is given times 2^32; the result is times 2^16.
GYRE_HOST_DEVICE inline std::int64_t root_16(std::int64_t squared) {
    std::int64_t root = 0;
    for (std::int64_t bit = std::int64_t{1} << 30; bit > 0; bit >>= 1) {
        root += (root + bit) * (root + bit) <= squared ? bit : 0;
    }
    return root;
}
GYRE_HOST_DEVICE inline int rounded_root(std::int64_t squared) {
    return static_cast<int>((root_16(squared) + (1 << 15)) >> 16);
}

// How large random parts of an image are: their areas, in 2^-16 of the image's, and their
// log2(width / height), times 2^16. The draws are uniform.
struct PartSizes {
    int least_area, most_area, least_log, most_log;
};

// Draws a part of at most most_height x most_width as torchvision does, in up to ten attempts, each
// with the next group of random numbers from `group` on. If all have failed, its height is 0.
GYRE_HOST_DEVICE inline Box draw_part(const RandomStream& stream, std::uint32_t sample,
                                      std::uint32_t group, const Shape& shape,
                                      const PartSizes& sizes, int most_height, int most_width) {
    for (std::uint32_t attempt = 0; attempt < 10; ++attempt) {
        const Philox4 random = stream.group(sample, group + attempt);
        const std::int64_t area =
            (sizes.least_area +
             draw_below(random.word[0], sizes.most_area - sizes.least_area + 1)) *
            (std::int64_t{shape.height} * shape.width);
        const int log =
            sizes.least_log + draw_below(random.word[1], sizes.most_log - sizes.least_log + 1);
        const int height = rounded_root(area * exp2_16(-log));
        const int width = rounded_root(area * exp2_16(log));
        if (height >= 1 && height <= most_height && width >= 1 && width <= most_width) {
            return {draw_below(random.word[2], shape.height - height + 1),
                    draw_below(random.word[3], shape.width - width + 1), height, width};
        }
    }
    return {0, 0, 0, 0};
}

// RandomResizedCrop(scale=(percent / 100, 1)), with its ratios from 3/4 to 4/3.
GYRE_HOST_DEVICE inline Box draw_resized_crop(const RandomStream& stream, std::uint32_t sample,
                                              const Shape& shape, int percent) {
    constexpr int kLog = 27200;  // log2(4 / 3) * 2^16
    const int height = shape.height, width = shape.width;
    const Box part = draw_part(stream, sample, 2, shape,
                               {(percent << 16) / 100, 1 << 16, -kLog, kLog}, height, width);
    if (part.height > 0) {
        return part;
    }
    // The largest in the middle with such a ratio.
    const int tall = 4 * width < 3 * height ? (4 * width + 1) / 3 : height;
    const int wide = 3 * width > 4 * height ? (4 * height + 1) / 3 : width;
    return {(height - tall) / 2, (width - wide) / 2, tall, wide};
}

// RandomErasing(p=percent / 100), with its scale from 0.02 to 0.33 and its ratios of height and
// width from 0.3 to 3.3.
GYRE_HOST_DEVICE inline Box draw_erasing(const RandomStream& stream, std::uint32_t sample,
                                         const Shape& shape, int percent) {
    if (draw_below(stream.group(sample, 12).word[0], 100) >= percent) {
        return {0, 0, 0, 0};
    }
    return draw_part(stream, sample, 13, shape, {1311, 21627, -112884, 113834}, shape.height - 1,
                     shape.width - 1);
}

// random: a bit of this image and epoch.
GYRE_HOST_DEVICE inline int draw_flip(const AugmentArgs& args, std::uint32_t sample, int random) {
    switch (args.spec.flip) {
        case Flip::random:
            return random;
        case Flip::alternating: {
            const RandomStream first{args.seed, RandomPurpose::augment, 0, 0};
            return static_cast<int>((first.group(sample, 1).word[0] >> 31) ^ (*args.epoch & 1));
        }
        case Flip::always:
            return 1;
        default:
            return 0;
    }
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
    drawn.flip = draw_flip(args, sample, static_cast<int>(others.word[0] >> 31));
    drawn.cut = {draw_below(others.word[1], shape.height) - spec.cutout / 2,
                 draw_below(others.word[2], shape.width) - spec.cutout / 2, spec.cutout,
                 spec.cutout};
    drawn.erased = {0, 0, 0, 0};
    if (spec.erasing > 0) {
        drawn.erased = draw_erasing(stream, sample, shape, spec.erasing);
    }
    drawn.unused = 0;
    drawn.part = {0, 0, shape.height, shape.width};
    if (spec.resized_crop > 0) {
        drawn.part = draw_resized_crop(stream, sample, shape, spec.resized_crop);
    }
    drawn.step_y = drawn.part.height * DrawnAugment::kStep / shape.height;
    drawn.step_x = drawn.part.width * DrawnAugment::kStep / shape.width;
    drawn.sine = 0;
    drawn.cosine = DrawnAugment::kOne;
    if (spec.rotate > 0) {
        const int most = 128 * spec.rotate;
        set_angle(drawn, draw_below(others.word[3], 2 * most + 1) - most);
    }
    return drawn;
}

// The value at (y, x): 0 for the mean, or the pixel that moves there * scale + shift.
GYRE_HOST_DEVICE inline float augmented_value(const DrawnAugment& drawn, const std::uint8_t* plane,
                                              int y, int x, float scale, float shift) {
    const int source = drawn.source(y, x);
    return source == DrawnAugment::kMean
               ? 0.0f
               : static_cast<float>(drawn.pixel(plane, source)) * scale + shift;
}

}  // namespace gyre
