// Shared parts of gyre's own kernels, and the functions of a step that are not operations of a net
// (those are in ops.hpp). Functions start their kernels in the stream and return. Pointers are
// device pointers to float32 unless noted; activations are [n][channels][height][width]. What a
// function computes is in kernels/ops/backend.hpp; block and grid, bytes and FLOPs in its .cu file.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "kernels/cuda/runtime.hpp"
#include "kernels/ops/backend.hpp"

namespace gyre::SIMT_NAMESPACE {

// Device memory for the partial results of one call at a time, or of one operation's
// backward_params and backward_input, with no other use in between. Grows to the largest request,
// which waits for the stream; operations reserve what they need when they are created.
class Workspace {
 public:
    explicit Workspace(Stream& stream);
    ~Workspace() {
        release(counts_);
        release(memory_);
        for (void* memory : outgrown_) {
            release(memory);
        }
    }
    Workspace(const Workspace&) = delete;
    Workspace& operator=(const Workspace&) = delete;

    void reserve(std::size_t count);
    void* bytes(std::size_t count) {
        reserve(count);
        return memory_;
    }
    // Counters of finished blocks (simt.hpp); kernels must leave them zero.
    std::uint32_t* counts() const { return counts_; }
    static constexpr int kCounts = 1024;
    // Call after a graph has captured the memory: it is then kept even if the workspace grows.
    void captured() { captured_ = true; }
    float* floats(std::int64_t elems) {
        return static_cast<float*>(bytes(static_cast<std::size_t>(elems) * sizeof(float)));
    }

 private:
    Stream& stream_;
    std::uint32_t* counts_;
    void* memory_ = nullptr;
    std::size_t bytes_ = 0;
    bool captured_ = false;
    std::vector<void*> outgrown_;
};

// The number of multiprocessors that sums are divided for, regardless of the actual GPU: that of
// the largest ones (H100, H200). The order of summation, and with it every bit of a training, is
// therefore the same on all GPUs.
constexpr int kPlannedMultiprocessors = 132;

// Everything besides operands that is needed to start kernels.
struct Context {
    Stream& stream;
    Workspace& workspace;
    int multiprocessors = 1;
    bool tf32 = false;  // allows rounding operands of matrix products to TF32 (tensor cores)
    std::size_t shared_bytes = 0;  // limit per block
};

// next_samples.cu
void next_samples(const Context& context, const NextSamplesArgs& args, int n,
                  std::int32_t* samples);

// gather.cu
void gather(const Context& context, const GatherArgs& args, int n, const Tensor& x,
            std::int32_t* y);
// n > 0
void gather_next(const Context& context, const NextSamplesArgs& next, const GatherArgs& args, int n,
                 std::int32_t* samples, const Tensor& x, std::int32_t* y);

// cross_entropy.cu
void cross_entropy(const Context& context, const CrossEntropyArgs& args, int n);

// loss_head.cu; returns null if there are more classes or features than supported.
std::unique_ptr<LossHead> make_loss_head(const Context& context, const LinearSpec& spec, int images,
                                         DataType type);

// training_pass.cu; returns null if the net's layers are unsupported or do not fit in a block.
std::unique_ptr<TrainingPass> make_training_pass(const Context& context,
                                                 const TrainingPassSpec& spec);

// optimizers.cu
void update(const Context& context, const UpdateArgs& args, std::int64_t elems, float* p,
            const float* g);

// loss_scale.cu
void unscale(const Context& context, std::int64_t elems, const LossScale* state,
             const FiniteCheck& finite, float* g);
void decide_step(const Context& context, const LossScaleArgs& args);

// relu.cu: dy = 0 where y <= 0, else factor * dy
void relu_backward(const Context& context, std::int64_t elems, float factor, const Tensor& y,
                   const Tensor& dy);

// dropout.cu: x [n][spec.in] of a training pass, in place
void dropout(const Context& context, const DropoutSpec& spec, const Batch& batch, const Tensor& x);

// add.cu
void add(const Context& context, std::int64_t elems, const float* x, float* y);

// vector.cu; elems floats
void fill(const Context& context, std::int64_t elems, float value, float* x);
void narrow(const Context& context, DataType type, std::int64_t elems, const float* x,
            std::uint16_t* y, const float* factor);
void widen(const Context& context, DataType type, std::int64_t elems, const std::uint16_t* x,
           float* y);
void round_to(const Context& context, DataType type, std::int64_t elems, const float* x, float* y);
void sum_of_squares(const Context& context, std::int64_t elems, const float* x,
                    const FiniteCheck& finite, ExactSum* sum);
void scale_to_norm(const Context& context, const ClipArgs& args, std::int64_t elems, float* x);

}  // namespace gyre::SIMT_NAMESPACE
