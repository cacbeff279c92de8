// The device below the nets: memory and one function for each kernel of a training step.
//
// Everything above this interface is the same on every device. Pointers are device pointers, of
// float32 unless said otherwise; `n` is the number of images. Parameters have PyTorch's shapes and
// order. Activations are logically [n][channels][height][width], but how they lie in memory is the
// backend's own affair: allocate activation_elems() and use import/export_activation to look.
// Calls may be asynchronous; synchronize() waits for all of them. A backend is used by one thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "kernels/philox.hpp"
#include "kernels/shapes.hpp"

namespace gyre {

// The training images as bytes, and which of them make the batch.
struct GatherArgs {
    const std::uint8_t* pixels = nullptr;   // [images][channels][height][width]
    const std::int32_t* labels = nullptr;   // [images]
    const std::int32_t* samples = nullptr;  // [n], indices of images
    Shape shape;
    const float* scale = nullptr;  // [channels], host memory: value = pixel * scale + shift
    const float* shift = nullptr;  // [channels], host memory
};

// Dropout keeps an element where its random word >= probability * 2^32, and scales it by
// 1 / (1 - probability); by_channel draws one word per channel (dropout2d).
struct DropoutArgs {
    RandomStream stream;
    const std::int32_t* samples = nullptr;  // [n], the images' indices in the training set
    Shape shape;
    float probability = 0.5f;
    bool by_channel = false;
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

// p, g, m, v: [elems] of the flat buffers. Formulas: torch.optim.SGD and torch.optim.Adam(W).
struct SgdArgs {
    float learning_rate = 0.01f;
    float momentum = 0.0f;
    float weight_decay = 0.0f;
    bool nesterov = false;
};
struct AdamArgs {
    float learning_rate = 0.001f;
    float beta1 = 0.9f;
    float beta2 = 0.999f;
    float epsilon = 1e-8f;
    float weight_decay = 0.0f;
    bool decoupled_decay = false;  // AdamW
    std::int64_t step = 1;         // counts from 1
};

class Backend {
 public:
    virtual ~Backend() = default;

    virtual std::string description() const = 0;

    // Memory. allocate() is zeroed; sizes are in bytes.
    virtual void* allocate(std::size_t bytes) = 0;
    virtual void release(void* memory) noexcept = 0;
    virtual void upload(void* device, const void* host, std::size_t bytes) = 0;
    virtual void download(void* host, const void* device, std::size_t bytes) = 0;
    virtual void fill_zero(void* device, std::size_t bytes) = 0;
    virtual void synchronize() = 0;

    // Activations: floats to allocate for n images, and conversion from and to [n][shape] on the
    // host.
    virtual std::int64_t activation_elems(const Shape& shape, int n) const = 0;
    virtual void import_activation(const Shape& shape, int n, const float* host, float* x) = 0;
    virtual void export_activation(const Shape& shape, int n, const float* x, float* host) = 0;

    // x [n][shape], y labels [n].
    virtual void gather(const GatherArgs& args, int n, float* x, std::int32_t* y) = 0;

    // y[o] = b[o] + sum over c, kh, kw of w[o][c][kh][kw] * x[c][oh*stride - padding + kh][...].
    virtual void conv2d_forward(const Conv2dShape& shape, int n, const float* x, const float* w,
                                const float* b, float* y) = 0;
    virtual void conv2d_backward_data(const Conv2dShape& shape, int n, const float* dy,
                                      const float* w, float* dx) = 0;
    // dw and db are overwritten, with zeros for n = 0.
    virtual void conv2d_backward_weights(const Conv2dShape& shape, int n, const float* x,
                                         const float* dy, float* dw, float* db) = 0;

    // argmax: position within the window of the first largest value; activation_elems() bytes, or
    // null where no backward pass follows.
    virtual void maxpool2d_forward(const MaxPool2dShape& shape, int n, const float* x, float* y,
                                   std::uint8_t* argmax) = 0;
    virtual void maxpool2d_backward(const MaxPool2dShape& shape, int n, const float* dy,
                                    const std::uint8_t* argmax, float* dx) = 0;

    // In place: y = max(y, 0); dy = 0 where y <= 0.
    virtual void relu_forward(const Shape& shape, int n, float* y) = 0;
    virtual void relu_backward(const Shape& shape, int n, const float* y, float* dy) = 0;

    // y = x w^T + b, x [n][in_features] (a flattened activation), y [n][out_features].
    virtual void linear_forward(const LinearShape& shape, int n, const float* x, const float* w,
                                const float* b, float* y) = 0;
    virtual void linear_backward_data(const LinearShape& shape, int n, const float* dy,
                                      const float* w, float* dx) = 0;
    // dw and db are overwritten, with zeros for n = 0.
    virtual void linear_backward_weights(const LinearShape& shape, int n, const float* x,
                                         const float* dy, float* dw, float* db) = 0;

    // In place, forward and backward alike: x *= mask / (1 - probability).
    virtual void dropout(const DropoutArgs& args, int n, float* x) = 0;

    virtual void cross_entropy(const CrossEntropyArgs& args, int n) = 0;

    // velocity may be null when momentum is 0; it starts as zeros.
    virtual void sgd_step(const SgdArgs& args, std::int64_t elems, float* p, const float* g,
                          float* velocity) = 0;
    virtual void adam_step(const AdamArgs& args, std::int64_t elems, float* p, const float* g,
                           float* m, float* v) = 0;
};

// Owns zeroed device memory for `elems` values of T. The backend must outlive it.
template <typename T>
class DeviceBuffer {
 public:
    DeviceBuffer() = default;
    DeviceBuffer(Backend& backend, std::int64_t elems)
        : memory_(static_cast<T*>(backend.allocate(static_cast<std::size_t>(elems) * sizeof(T))),
                  Release{&backend}),
          elems_(elems) {}

    T* get() const { return memory_.get(); }
    std::int64_t elems() const { return elems_; }
    std::size_t bytes() const { return static_cast<std::size_t>(elems_) * sizeof(T); }

 private:
    struct Release {
        Backend* backend;
        void operator()(T* memory) const noexcept { backend->release(memory); }
    };
    std::unique_ptr<T, Release> memory_{nullptr, Release{nullptr}};
    std::int64_t elems_ = 0;
};

// threads: workers inside this process, >= 1.
std::unique_ptr<Backend> make_cpu_backend(int threads);

}  // namespace gyre
