// A device, the operations of its nets, and the functions of a training step beside them.
//
// Pointers are device pointers, of float32 unless said otherwise; `n` is the number of images.
// Parameters have PyTorch's shapes and order. Activations are logically
// [n][channels][height][width], but how they lie in memory is the backend's own affair: allocate
// activation_elems() and use import/export_activation to look.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "kernels/base/data_type.hpp"
#include "kernels/base/epoch_order.hpp"
#include "kernels/device/device.hpp"
#include "kernels/ops/loss_head.hpp"
#include "kernels/ops/loss_scale.hpp"
#include "kernels/ops/op.hpp"
#include "kernels/ops/shapes.hpp"
#include "kernels/ops/step.hpp"
#include "kernels/ops/training_pass.hpp"

namespace gyre {

class Backend : public Device, public OpFactory {
 public:
    // What was chosen for each layer and why, for -v; empty where there was no choice.
    virtual std::string choices() const { return {}; }

    // The whole training pass of a net as one operation; null: this backend has none for such a
    // net, which then runs operation by operation.
    virtual std::unique_ptr<TrainingPass> make_pass(const TrainingPassSpec& /*spec*/) {
        return nullptr;
    }

    // A net's last linear layer with the loss, for training passes of up to `images`; null: there
    // is none for such a layer, which then runs like others. type: of x, dx and dy.
    virtual std::unique_ptr<LossHead> make_loss_head(const LinearSpec& /*spec*/, int /*images*/,
                                                     DataType /*type*/) {
        return nullptr;
    }

    // Activations: floats to allocate for n images, and conversion from and to [n][shape] on the
    // host.
    virtual std::int64_t activation_elems(const Shape& shape, int n) const = 0;
    virtual void import_activation(const Shape& shape, int n, const float* host, float* x) = 0;
    virtual void export_activation(const Shape& shape, int n, const float* x, float* host) = 0;

    // samples [n]: indices of the images of the step that is next, which then is the one after it.
    virtual void next_samples(const NextSamplesArgs& args, int n, std::int32_t* samples) = 0;
    // x [n][shape] of any type, y labels [n].
    virtual void gather(const GatherArgs& args, int n, const Tensor& x, std::int32_t* y) = 0;
    // Both.
    virtual void gather_next(const NextSamplesArgs& next, const GatherArgs& args, int n,
                             std::int32_t* samples, const Tensor& x, std::int32_t* y) {
        next_samples(next, n, samples);
        GatherArgs of_step = args;
        of_step.samples = samples;
        gather(of_step, n, x, y);
    }
    virtual void cross_entropy(const CrossEntropyArgs& args, int n) = 0;

    // x *= min(1, most / (||x|| + 1e-6)), as torch.nn.utils.clip_grad_norm_.
    virtual void clip_norm(std::int64_t elems, float most, float* x, const FiniteCheck& finite) = 0;
    // g *= 1 / state->scale, on the device; those that are not finite are reported in its
    // found_inf, and become 0.
    virtual void unscale(std::int64_t elems, LossScale* state, float* g) = 0;
    virtual void decide_step(const LossScaleArgs& args) = 0;
    // velocity may be null when momentum is 0; it starts as zeros.
    virtual void sgd_step(const SgdArgs& args, std::int64_t elems, float* p, const float* g,
                          float* velocity) = 0;
    virtual void adam_step(const AdamArgs& args, std::int64_t elems, float* p, const float* g,
                           float* m, float* v) = 0;
};

// What a backend on a GPU, real or emulated, is asked for.
// --kernels ours|cudnn|auto. Emulated there is no library, and auto chooses between equals.
enum class KernelSet { ours, library, automatic };
struct GpuOptions {
    int device = 0;
    bool share = false;  // ranks take turns where there are fewer devices
    KernelSet kernels = KernelSet::ours;
    bool deterministic = false;  // libraries may use only algorithms that are
    bool tf32 = false;           // matrix products may round their operands to TF32
    std::string choices_file;    // automatic: timings are read from and added to it; empty: none
};

// threads: workers inside this process, >= 1.
std::unique_ptr<Backend> make_cpu_backend(int threads);
// Throws Error (usage) where this build has no CUDA, or (internal) where the GPU cannot be used.
std::unique_ptr<Backend> make_cuda_backend(const GpuOptions& options);
// gyre's own CUDA kernels, run on the CPU (kernels/emulation/emulator.hpp).
std::unique_ptr<Backend> make_emulated_backend(const GpuOptions& options);
// GPUs that the CUDA backend can use; 0 where there is no driver, GPU or CUDA in this build.
int cuda_device_count();

}  // namespace gyre
