// Operations over the functions of LayerKernels, for backends that do not make their own yet.
#include "kernels/backend.hpp"

#include "kernels/add_op.hpp"

namespace gyre {
namespace {

class Conv2dOp final : public Op {
 public:
    Conv2dOp(Backend& backend, const Conv2dShape& shape) : backend_(backend), shape_(shape) {}
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
    Backend& backend_;
    const Conv2dShape shape_;
};

class LinearOp final : public Op {
 public:
    LinearOp(Backend& backend, const LinearShape& shape) : backend_(backend), shape_(shape) {}
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
    Backend& backend_;
    const LinearShape shape_;
};

class MaxPool2dOp final : public Op {
 public:
    MaxPool2dOp(Backend& backend, const MaxPool2dShape& shape, int train_images)
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
    Backend& backend_;
    const MaxPool2dShape shape_;
    const std::size_t saved_bytes_;
};

class ReluOp final : public Op {
 public:
    ReluOp(Backend& backend, const Shape& shape) : backend_(backend), shape_(shape) {}
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
    Backend& backend_;
    const Shape shape_;
};

// Keeps no mask: the backward pass draws the same random numbers again.
class DropoutOp final : public Op {
 public:
    DropoutOp(Backend& backend, const DropoutSpec& spec) : backend_(backend), spec_(spec) {}
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
    Backend& backend_;
    const DropoutSpec spec_;
};

}  // namespace

std::unique_ptr<Op> Backend::make(const std::string& name, const OpSpec& spec,
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
        return std::make_unique<Conv2dOp>(*this, conv->shape);
    }
    if (const auto* linear = std::get_if<LinearSpec>(&spec)) {
        if (linear->fused()) {
            return nullptr;
        }
        announce([&](int n, bool training) { prepare_linear(name, linear->shape, n, training); });
        return std::make_unique<LinearOp>(*this, linear->shape);
    }
    if (const auto* pool = std::get_if<MaxPool2dSpec>(&spec)) {
        announce([&](int n, bool training) { prepare_maxpool2d(name, pool->shape, n, training); });
        return std::make_unique<MaxPool2dOp>(*this, pool->shape, sizes.train_images);
    }
    if (const auto* relu = std::get_if<ReluSpec>(&spec)) {
        return std::make_unique<ReluOp>(*this, relu->in);
    }
    if (const auto* dropout = std::get_if<DropoutSpec>(&spec)) {
        return std::make_unique<DropoutOp>(*this, *dropout);
    }
    if (const auto* add = std::get_if<AddSpec>(&spec)) {
        return std::make_unique<AddOp>(*this, *add);
    }
    return nullptr;
}

}  // namespace gyre
