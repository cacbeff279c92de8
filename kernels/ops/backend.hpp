// A device, the operations of its nets, and the other functions of a training step.
//
// Pointers are device pointers to float32 unless noted; `n` is the number of images. Parameters
// have PyTorch's shapes and order. Activations are logically [n][channels][height][width], but each
// backend has its own memory layout: allocate activation_elems(), and read them with
// export_activation().
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "base/data_type.hpp"
#include "base/epoch_order.hpp"
#include "kernels/device/device.hpp"
#include "kernels/ops/loss_head.hpp"
#include "kernels/ops/loss_scale.hpp"
#include "kernels/ops/op.hpp"
#include "kernels/ops/shapes.hpp"
#include "kernels/ops/step.hpp"
#include "kernels/ops/training_pass.hpp"
#include "kernels/ops/update_rules.hpp"

namespace gyre {

class Backend : public Device, public OpFactory {
 public:
    // For -v: the choice for each layer and its reason; empty if there was no choice.
    virtual std::string choices() const { return {}; }

    // A net's whole training pass as one operation; null: this backend does not support the net,
    // which then runs operation by operation.
    virtual std::unique_ptr<TrainingPass> make_pass(const TrainingPassSpec& /*spec*/) {
        return nullptr;
    }

    // A net's last linear layer fused with the loss, for training passes of up to `images`; null:
    // it is not supported for this layer, which then runs like others. type: that of x, dx and dy.
    virtual std::unique_ptr<LossHead> make_loss_head(const LinearSpec& /*spec*/, int /*images*/,
                                                     DataType /*type*/) {
        return nullptr;
    }

    // Activations: the number of floats to allocate for n images, and conversion from and to
    // [n][shape] on the host.
    virtual std::int64_t activation_elems(const Shape& shape, int n) const = 0;
    virtual void import_activation(const Shape& shape, int n, const float* host, float* x) = 0;
    virtual void export_activation(const Shape& shape, int n, const float* x, float* host) = 0;

    // Writes samples [n], the indices of the next step's images, and advances the step.
    virtual void next_samples(const NextSamplesArgs& args, int n, std::int32_t* samples) = 0;
    // x [n][shape] of any type, y labels [n].
    virtual void gather(const GatherArgs& args, int n, const Tensor& x, std::int32_t* y) = 0;
    // Combines the two.
    virtual void gather_next(const NextSamplesArgs& next, const GatherArgs& args, int n,
                             std::int32_t* samples, const Tensor& x, std::int32_t* y) {
        next_samples(next, n, samples);
        GatherArgs of_step = args;
        of_step.samples = samples;
        gather(of_step, n, x, y);
    }
    virtual void cross_entropy(const CrossEntropyArgs& args, int n) = 0;

    // *sum += ||x||^2; each 16 elements from the first on are one term, whichever range they are
    // in. The sum is on the device.
    virtual void sum_of_squares(std::int64_t elems, const float* x, const FiniteCheck& finite,
                                ExactSum* sum) = 0;
    // x *= clip_factor()
    virtual void scale_to_norm(const ClipArgs& args, std::int64_t elems, float* x) = 0;
    // g *= 1 / state->scale, with state on the device; non-finite values are reported and set to 0.
    virtual void unscale(std::int64_t elems, const LossScale* state, const FiniteCheck& finite,
                         float* g) = 0;
    virtual void decide_step(const LossScaleArgs& args) = 0;
    virtual void update(const UpdateArgs& args, std::int64_t elems, float* p, const float* g) = 0;
};

}  // namespace gyre
