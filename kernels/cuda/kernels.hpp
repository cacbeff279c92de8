// The launchers of gyre's own kernels, one .cu file a layer: each starts its kernels in the stream
// and returns. All pointers are device pointers of float32 unless said otherwise; activations are
// [n][channels][height][width]. What a function computes is said in kernels/backend.hpp, how (block
// and grid, bytes and FLOPs) in its .cu file.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/backend.hpp"
#include "kernels/cuda/runtime.hpp"

namespace gyre::SIMT_NAMESPACE {

// Device memory for the partial results of one call at a time. Grows to the largest request, which
// waits for the stream; prepared layers never grow it in a step.
class Workspace {
 public:
    explicit Workspace(Stream& stream) : stream_(stream) {}
    ~Workspace() {
        release(memory_);
        for (void* memory : outgrown_) {
            release(memory);
        }
    }
    Workspace(const Workspace&) = delete;
    Workspace& operator=(const Workspace&) = delete;

    void* bytes(std::size_t count);
    // Graphs have captured the memory: it stays, whatever more is asked for.
    void captured() { captured_ = true; }
    float* floats(std::int64_t elems) {
        return static_cast<float*>(bytes(static_cast<std::size_t>(elems) * sizeof(float)));
    }

 private:
    Stream& stream_;
    void* memory_ = nullptr;
    std::size_t bytes_ = 0;
    bool captured_ = false;
    std::vector<void*> outgrown_;
};

// What a launcher needs beside its operands.
struct Context {
    Stream& stream;
    Workspace& workspace;
    int multiprocessors = 1;
    bool tf32 = false;  // matrix products may round their operands to TF32 (tensor cores)
};

// gather.cu
void gather(const Context& context, const GatherArgs& args, int n, float* x, std::int32_t* y);

// conv2d_direct.cu and conv2d_gemm.cu; these choose between them.
void conv2d_forward(const Context& context, const Conv2dShape& shape, int n, const float* x,
                    const float* w, const float* b, float* y);
void conv2d_backward_data(const Context& context, const Conv2dShape& shape, int n, const float* dy,
                          const float* w, float* dx);
void conv2d_backward_weights(const Context& context, const Conv2dShape& shape, int n,
                             const float* x, const float* dy, float* dw, float* db);
// The largest workspace of the three, for up to n images.
std::int64_t conv2d_workspace_elems(const Context& context, const Conv2dShape& shape, int n);

// maxpool2d.cu
void maxpool2d_forward(const Context& context, const MaxPool2dShape& shape, int n, const float* x,
                       float* y, std::uint8_t* argmax);
void maxpool2d_backward(const Context& context, const MaxPool2dShape& shape, int n, const float* dy,
                        const std::uint8_t* argmax, float* dx);

// relu.cu; elems floats
void relu_forward(const Context& context, std::int64_t elems, float* y);
void relu_backward(const Context& context, std::int64_t elems, const float* y, float* dy);

// dropout.cu
void dropout(const Context& context, const DropoutArgs& args, int n, float* x);

// linear.cu
void linear_forward(const Context& context, const LinearShape& shape, int n, const float* x,
                    const float* w, const float* b, float* y);
void linear_backward_data(const Context& context, const LinearShape& shape, int n, const float* dy,
                          const float* w, float* dx);
void linear_backward_weights(const Context& context, const LinearShape& shape, int n,
                             const float* x, const float* dy, float* dw, float* db);
std::int64_t linear_workspace_elems(const Context& context, const LinearShape& shape, int n);

// cross_entropy.cu
void cross_entropy(const Context& context, const CrossEntropyArgs& args, int n);

// optimizers.cu
void sgd_step(const Context& context, const SgdArgs& args, std::int64_t elems, float* p,
              const float* g, float* velocity);
void adam_step(const Context& context, const AdamArgs& args, std::int64_t elems, float* p,
               const float* g, float* m, float* v);

// vector.cu; elems floats
void fill(const Context& context, std::int64_t elems, float value, float* x);
void add(const Context& context, std::int64_t elems, const float* x, float* y);
void narrow(const Context& context, DataType type, std::int64_t elems, const float* x,
            std::uint16_t* y);
void widen(const Context& context, DataType type, std::int64_t elems, const std::uint16_t* x,
           float* y);
void clip_norm(const Context& context, std::int64_t elems, float most, float* x,
               const FiniteCheck& finite);

}  // namespace gyre::SIMT_NAMESPACE
