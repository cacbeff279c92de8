// A backend whose layers are functions, until it makes its own operations: an adapter.
#pragma once

#include "kernels/backend.hpp"

#include "kernels/add_op.hpp"

namespace gyre {

// The layers that several libraries implement. Gradients of weights for n = 0 are a backend's
// affair: what stands behind it is called with images only.
class LayerKernels {
 public:
    virtual ~LayerKernels() = default;
    // What computes, as text.
    virtual std::string implementation() const = 0;

    // What a net announces of its layers before the first step, once for each number of images that
    // many passes have, training passes first, so that memory is reserved and kernels are chosen
    // then; a pass without training has no backward pass. Passes of other sizes work, too.
    virtual void prepare_conv2d(const std::string& /*layer*/, const Conv2dShape&, int /*n*/,
                                bool /*training*/) {}
    virtual void prepare_maxpool2d(const std::string& /*layer*/, const MaxPool2dShape&, int /*n*/,
                                   bool /*training*/) {}
    virtual void prepare_linear(const std::string& /*layer*/, const LinearShape&, int /*n*/,
                                bool /*training*/) {}
    // What was chosen for each layer and why, for -v; empty where there was no choice.
    virtual std::string choices() const { return {}; }

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
    virtual void maxpool2d_backward(const MaxPool2dShape& shape, int n, const float* x,
                                    const std::uint8_t* argmax, const float* dy, float* dx) = 0;

    // y = x w^T + b, x [n][in_features] (a flattened activation), y [n][out_features].
    virtual void linear_forward(const LinearShape& shape, int n, const float* x, const float* w,
                                const float* b, float* y) = 0;
    virtual void linear_backward_data(const LinearShape& shape, int n, const float* dy,
                                      const float* w, float* dx) = 0;
    // dw and db are overwritten, with zeros for n = 0.
    virtual void linear_backward_weights(const LinearShape& shape, int n, const float* x,
                                         const float* dy, float* dw, float* db) = 0;

    virtual void cross_entropy(const CrossEntropyArgs& args, int n) = 0;
};

class LayerBackend : public Backend, public LayerKernels {
 public:
    std::string implementation() const override { return description(); }
    std::string choices() const override = 0;
    std::unique_ptr<Op> make(const std::string& name, const OpSpec& spec,
                             const OpSizes& sizes) override;
    void cross_entropy(const CrossEntropyArgs& args, int n) override = 0;

    // In place: y = max(y, 0); dy = 0 where y <= 0.
    virtual void relu_forward(const Shape& shape, int n, float* y) = 0;
    virtual void relu_backward(const Shape& shape, int n, const float* y, float* dy) = 0;

    // In place, forward and backward alike: x *= mask / (1 - probability).
    virtual void dropout(const DropoutArgs& args, int n, float* x) = 0;
};

namespace layer_ops {

class Conv2dOp final : public Op {
 public:
    Conv2dOp(LayerBackend& backend, const Conv2dShape& shape) : backend_(backend), shape_(shape) {}
    OpNeeds needs() const override { return {}; }
    void forward(const Batch& batch, const OpIo& io) override {
        backend_.conv2d_forward(shape_, batch.n, io.x.f32(), io.params[0].f32(), io.params[1].f32(),
                                io.y.f32());
    }
    void backward_params(const Batch& batch, const OpIo& io) override {
        backend_.conv2d_backward_weights(shape_, batch.n, io.x.f32(), io.dy.f32(),
                                         io.grads[0].f32(), io.grads[1].f32());
    }
    void backward_input(const Batch& batch, const OpIo& io) override {
        backend_.conv2d_backward_data(shape_, batch.n, io.dy.f32(), io.params[0].f32(),
                                      io.dx.f32());
    }

 private:
    LayerBackend& backend_;
    const Conv2dShape shape_;
};

class LinearOp final : public Op {
 public:
    LinearOp(LayerBackend& backend, const LinearShape& shape) : backend_(backend), shape_(shape) {}
    OpNeeds needs() const override { return {}; }
    void forward(const Batch& batch, const OpIo& io) override {
        backend_.linear_forward(shape_, batch.n, io.x.f32(), io.params[0].f32(), io.params[1].f32(),
                                io.y.f32());
    }
    void backward_params(const Batch& batch, const OpIo& io) override {
        backend_.linear_backward_weights(shape_, batch.n, io.x.f32(), io.dy.f32(),
                                         io.grads[0].f32(), io.grads[1].f32());
    }
    void backward_input(const Batch& batch, const OpIo& io) override {
        backend_.linear_backward_data(shape_, batch.n, io.dy.f32(), io.params[0].f32(),
                                      io.dx.f32());
    }

 private:
    LayerBackend& backend_;
    const LinearShape shape_;
};

class MaxPool2dOp final : public Op {
 public:
    MaxPool2dOp(LayerBackend& backend, const MaxPool2dShape& shape, int train_images)
        : backend_(backend),
          shape_(shape),
          saved_bytes_(
              static_cast<std::size_t>(backend.activation_elems(shape.out(), train_images))) {}
    OpNeeds needs() const override { return {.saved_bytes = saved_bytes_}; }
    void forward(const Batch& batch, const OpIo& io) override {
        backend_.maxpool2d_forward(shape_, batch.n, io.x.f32(), io.y.f32(),
                                   batch.training ? static_cast<std::uint8_t*>(io.saved) : nullptr);
    }
    void backward_input(const Batch& batch, const OpIo& io) override {
        backend_.maxpool2d_backward(shape_, batch.n, io.x.f32(),
                                    static_cast<std::uint8_t*>(io.saved), io.dy.f32(), io.dx.f32());
    }

 private:
    LayerBackend& backend_;
    const MaxPool2dShape shape_;
    const std::size_t saved_bytes_;
};

class ReluOp final : public Op {
 public:
    ReluOp(LayerBackend& backend, const Shape& shape) : backend_(backend), shape_(shape) {}
    OpNeeds needs() const override {
        return {.in_place = true, .backward_reads_x = false, .backward_reads_y = true};
    }
    void forward(const Batch& batch, const OpIo& io) override {
        backend_.relu_forward(shape_, batch.n, io.y.f32());
    }
    void backward_input(const Batch& batch, const OpIo& io) override {
        backend_.relu_backward(shape_, batch.n, io.y.f32(), io.dx.f32());
    }

 private:
    LayerBackend& backend_;
    const Shape shape_;
};

// Keeps no mask: the backward pass draws the same random numbers again.
class DropoutOp final : public Op {
 public:
    DropoutOp(LayerBackend& backend, const DropoutSpec& spec) : backend_(backend), spec_(spec) {}
    OpNeeds needs() const override { return {.in_place = true, .backward_reads_x = false}; }
    void forward(const Batch& batch, const OpIo& io) override {
        if (batch.training) {
            apply(batch, io.y.f32());
        }
    }
    void backward_input(const Batch& batch, const OpIo& io) override { apply(batch, io.dx.f32()); }

 private:
    void apply(const Batch& batch, float* x) {
        backend_.dropout({{batch.seed, RandomPurpose::dropout, spec_.stream, 0},
                          batch.epoch,
                          batch.samples,
                          spec_.in,
                          spec_.probability,
                          spec_.by_channel},
                         batch.n, x);
    }
    LayerBackend& backend_;
    const DropoutSpec spec_;
};

}  // namespace layer_ops

inline std::unique_ptr<Op> LayerBackend::make(const std::string& name, const OpSpec& spec,
                                              const OpSizes& sizes) {
    const auto announce = [&](const auto& prepare) {
        const auto each = [&](const std::vector<int>& chosen, int most, bool training) {
            for (const int n : chosen.empty() && most > 0 ? std::vector<int>{most} : chosen) {
                prepare(n, training);
            }
        };
        each(sizes.train_sizes, sizes.train_images, true);
        each(sizes.eval_sizes, sizes.eval_images, false);
    };
    if (const auto* conv = std::get_if<Conv2dSpec>(&spec)) {
        if (conv->fused()) {
            return nullptr;
        }
        announce([&](int n, bool training) { prepare_conv2d(name, conv->shape, n, training); });
        return std::make_unique<layer_ops::Conv2dOp>(*this, conv->shape);
    }
    if (const auto* linear = std::get_if<LinearSpec>(&spec)) {
        if (linear->fused()) {
            return nullptr;
        }
        announce([&](int n, bool training) { prepare_linear(name, linear->shape, n, training); });
        return std::make_unique<layer_ops::LinearOp>(*this, linear->shape);
    }
    if (const auto* pool = std::get_if<MaxPool2dSpec>(&spec)) {
        announce([&](int n, bool training) { prepare_maxpool2d(name, pool->shape, n, training); });
        return std::make_unique<layer_ops::MaxPool2dOp>(*this, pool->shape, sizes.train_images);
    }
    if (const auto* relu = std::get_if<ReluSpec>(&spec)) {
        return std::make_unique<layer_ops::ReluOp>(*this, relu->in);
    }
    if (const auto* dropout = std::get_if<DropoutSpec>(&spec)) {
        return std::make_unique<layer_ops::DropoutOp>(*this, *dropout);
    }
    if (const auto* add = std::get_if<AddSpec>(&spec)) {
        return std::make_unique<AddOp>(*this, *add);
    }
    return nullptr;
}

}  // namespace gyre
