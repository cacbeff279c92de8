// What the functions of a training step are given that are no operation of a net: the batch's
// images, the loss, the check of gradients and the update.
#pragma once

#include <cmath>
#include <cstdint>

#include "base/data_type.hpp"
#include "base/epoch_order.hpp"
#include "base/exact_sum.hpp"
#include "kernels/ops/augment.hpp"
#include "kernels/ops/mix.hpp"
#include "kernels/ops/shapes.hpp"

namespace gyre {

// The training images as bytes, and which of them make the batch.
struct GatherArgs {
    const std::uint8_t* pixels = nullptr;   // [images][channels][height][width]
    const std::int32_t* labels = nullptr;   // [images]
    const std::int32_t* samples = nullptr;  // [n], indices of images
    Shape shape;
    const float* scale = nullptr;  // [channels]: value = pixel * scale + shift
    const float* shift = nullptr;  // [channels]
    AugmentArgs augment = {};
};

// How far a training is. It is on the device, so that a step that was captured once finds images
// of its own in every launch.
struct EpochPlace {
    std::uint32_t epoch = 0;    // from 1
    std::uint32_t step = 0;     // the next one's, from 0
    std::uint32_t arrived = 0;  // blocks of a launch that have read it; 0 between launches
};

// Which images a rank takes in a step: those at the positions step * step_images + first, ...
struct NextSamplesArgs {
    EpochOrder order{0, 0, false};
    EpochPlace* place = nullptr;  // on the device
    std::int64_t step_images = 0;
    std::int64_t first = 0;
};

// Log-softmax, negative log-likelihood and its gradient in one pass over the logits [n][classes].
// With label smoothing E the target is (1 - E) onehot + E / classes, as PyTorch's CrossEntropyLoss
// has it.
struct CrossEntropyArgs {
    int classes = 0;
    const float* logits = nullptr;
    // [n]; if images are mixed [3][n]: their own, their partners', and DrawnMix's shares.
    const std::int32_t* labels = nullptr;
    float scale = 1.0f;         // 1 / size of the global batch
    float* gradient = nullptr;  // [n][classes]: scale * (softmax - target); may be null
    float* sums = nullptr;      // [2], overwritten: scale * sum of losses, number of correct images
    float label_smoothing = 0.0f;  // in [0, 1); LossHead takes only 0
    // [classes], on the device: a further factor of an image's loss, by its label; null: 1, which
    // is all that LossHead takes.
    const float* class_weights = nullptr;
    bool mixed = false;  // LossHead takes only false
};

// The targets of an image: its loss is the sum over them of weight * cross-entropy with the label.
struct LossTarget {
    int label;
    float weight;
};
// Returns how many there are, the one with the larger share first.
GYRE_HOST_DEVICE inline int find_targets(const CrossEntropyArgs& args, int n, std::int64_t image,
                                         LossTarget (&targets)[2]) {
    const int label = args.labels[image];
    targets[0] = {label, args.class_weights == nullptr ? 1.0f : args.class_weights[label]};
    if (!args.mixed) {
        return 1;
    }
    const int other = args.labels[n + image];
    const float share = static_cast<float>(args.labels[2 * std::int64_t{n} + image]) * 0x1p-16f;
    targets[0].weight *= share;
    targets[1] = {
        other, (1.0f - share) * (args.class_weights == nullptr ? 1.0f : args.class_weights[other])};
    if (share < 0.5f) {
        const LossTarget first = targets[0];
        targets[0] = targets[1];
        targets[1] = first;
    }
    return 2;
}

// Where a kernel that reads gradients reports those that are not finite: *word becomes at least
// 1 + (first_elem + i) / kGrain for each such element i, and stays as it is if there is none. An
// int32, so that all elements of any net fit.
struct FiniteCheck {
    static constexpr std::int64_t kGrain = 16;
    std::int32_t* word = nullptr;  // on the device; null: nothing is checked
    std::int64_t first_elem = 0;   // a multiple of kGrain
};

// A rank's findings in its gradients of a step, on the device, before they are clipped or an update
// is skipped. If ranks have shares of the gradients, all of them gather the findings of each.
struct GradientFacts {
    ExactSum squares = {};        // of its gradients
    std::int32_t not_finite = 0;  // FiniteCheck's word; 0 again once the step is decided
    std::int32_t unused = 0;      // so that no byte is undefined
};

// The arguments of clipping gradients to a norm.
struct ClipArgs {
    float most = 0.0f;                        // their norm afterwards
    const GradientFacts* of_ranks = nullptr;  // [ranks], on the device
    int ranks = 1;
    float* norm = nullptr;  // on the device: set to their norm before; null: not asked for
};

// A limb of the sum of the squares that all ranks have found.
GYRE_HOST_DEVICE inline std::int64_t limb_of_ranks(const ClipArgs& args, int limb) {
    std::int64_t sum = 0;
    for (int rank = 0; rank < args.ranks; ++rank) {
        sum += args.of_ranks[rank].squares.limbs[limb];
    }
    return sum;
}

// The factor of torch.nn.utils.clip_grad_norm_: min(1, most / (norm + 1e-6)), NaN if the norm is.
GYRE_HOST_DEVICE inline float clip_factor(const ClipArgs& args, double norm) {
    const double ratio = double{args.most} / (norm + 1e-6);
    return ratio >= 1.0 ? 1.0f : static_cast<float>(ratio);
}

// What an update reads that changes from step to step. It is on the device, so that a step that
// was captured once reads it anew in every launch. Step t counts from 1.
struct StepScalars {
    float learning_rate = 0.0f;
    float adam_step_size = 0.0f;   // learning rate / (1 - beta1^t)
    float adam_correction = 0.0f;  // 1 / sqrt(1 - beta2^t)
    float shrink = 1.0f;           // 1 - learning rate * weight decay, if it is decoupled
    bool operator==(const StepScalars&) const = default;
};

// Elements that an update leaves alone, begin <= i < begin + elems, both multiples of
// FiniteCheck::kGrain.
struct UpdateGap {
    std::int64_t begin = 0, elems = 0;
};

}  // namespace gyre
