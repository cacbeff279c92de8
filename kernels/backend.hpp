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
#include "kernels/ops/op.hpp"
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
};

// How far a training is. It lies on the device, so that a step that was captured once finds images
// of its own in every launch.
struct EpochPlace {
    std::uint32_t epoch = 0;  // from 1
    std::uint32_t step = 0;   // the next one's, from 0
};

// Which images a rank takes in a step: those at the positions step * step_images + first, ...
struct NextSamplesArgs {
    EpochOrder order;
    EpochPlace* place = nullptr;  // on the device
    std::int64_t step_images = 0;
    std::int64_t first = 0;
};

// Log-softmax, negative log-likelihood and its gradient in one pass over the logits [n][classes].
struct CrossEntropyArgs {
    int classes = 0;
    const float* logits = nullptr;
    const std::int32_t* labels = nullptr;  // [n]
    float scale = 1.0f;                    // 1 / size of the global batch
    float* gradient = nullptr;             // [n][classes]: scale * (softmax - onehot); may be null
    float* sums = nullptr;  // [2], overwritten: scale * sum of losses, number of correct images
};

// Where a kernel that reads gradients reports those that are not finite: *word becomes at least
// 1 + (first_elem + i) / kGrain for each such element i, and stays as it is where there is none. An
// int32, so that all elements of any net fit.
struct FiniteCheck {
    static constexpr std::int64_t kGrain = 16;
    std::int32_t* word = nullptr;  // on the device; null: nothing is checked
    std::int64_t first_elem = 0;   // a multiple of kGrain
};

// What an update reads that changes from step to step. It lies on the device, so that a step that
// was captured once reads it anew in every launch. Step t counts from 1.
struct StepScalars {
    float learning_rate = 0.0f;    // SGD's
    float adam_step_size = 0.0f;   // learning rate / (1 - beta1^t)
    float adam_correction = 0.0f;  // 1 / sqrt(1 - beta2^t)
    float adam_shrink = 1.0f;      // AdamW: 1 - learning rate * weight decay
    bool operator==(const StepScalars&) const = default;
};

// p, g, m, v: [elems] of the flat buffers. Formulas: torch.optim.SGD and torch.optim.Adam(W).
struct SgdArgs {
    const StepScalars* scalars = nullptr;  // on the device
    float momentum = 0.0f;
    float weight_decay = 0.0f;
    bool nesterov = false;
    FiniteCheck finite = {};
};
struct AdamArgs {
    const StepScalars* scalars = nullptr;  // on the device
    float beta1 = 0.9f;
    float beta2 = 0.999f;
    float epsilon = 1e-8f;
    float weight_decay = 0.0f;  // added to the gradient; AdamW's is in the scalars
    FiniteCheck finite = {};
};

class Backend : public Device, public OpFactory {
 public:
    // What was chosen for each layer and why, for -v; empty where there was no choice.
    virtual std::string choices() const { return {}; }

    // Activations: floats to allocate for n images, and conversion from and to [n][shape] on the
    // host.
    virtual std::int64_t activation_elems(const Shape& shape, int n) const = 0;
    virtual void import_activation(const Shape& shape, int n, const float* host, float* x) = 0;
    virtual void export_activation(const Shape& shape, int n, const float* x, float* host) = 0;

    // samples [n]: indices of the images of the step that is next, which then is the one after it.
    virtual void next_samples(const NextSamplesArgs& args, int n, std::int32_t* samples) = 0;
    // x [n][shape], y labels [n].
    virtual void gather(const GatherArgs& args, int n, float* x, std::int32_t* y) = 0;
    virtual void cross_entropy(const CrossEntropyArgs& args, int n) = 0;

    // x *= min(1, most / (||x|| + 1e-6)), as torch.nn.utils.clip_grad_norm_.
    virtual void clip_norm(std::int64_t elems, float most, float* x, const FiniteCheck& finite) = 0;
    // y += x
    virtual void add(std::int64_t elems, const float* x, float* y) = 0;
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
