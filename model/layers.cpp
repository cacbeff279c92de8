#include "model/layers.hpp"

#include <fmt/format.h>

#include "kernels/base/error.hpp"

namespace gyre::model {
namespace {

// Convolution and linear layers: a weight and a bias.
class WeightedLayer : public Layer {
 public:
    WeightedLayer(const std::string& layer_name, const Shape& in_shape, const Shape& out_shape,
                  std::vector<std::int64_t> weight_shape)
        : Layer(layer_name, in_shape, out_shape) {
        std::int64_t elems = 1;
        for (const std::int64_t extent : weight_shape) {
            elems *= extent;
        }
        const std::int64_t outputs = weight_shape[0];
        const std::int64_t fan_in = elems / outputs;
        parameters.push_back({name + ".weight", std::move(weight_shape), 0, elems, fan_in});
        parameters.push_back({name + ".bias", {outputs}, 0, outputs, fan_in});
    }

 protected:
    const float* weight(const Pass& pass) const {
        return pass.parameters + parameters[0].offset_elems;
    }
    const float* bias(const Pass& pass) const {
        return pass.parameters + parameters[1].offset_elems;
    }
    float* weight_gradient(const Pass& pass) const {
        return pass.gradients + parameters[0].offset_elems;
    }
    float* bias_gradient(const Pass& pass) const {
        return pass.gradients + parameters[1].offset_elems;
    }
};

class Conv2d final : public WeightedLayer {
 public:
    Conv2d(const std::string& layer_name, const Conv2dShape& shape)
        : WeightedLayer(layer_name, shape.in, shape.out(),
                        {shape.out_channels, shape.in.channels, shape.kernel, shape.kernel}),
          shape_(shape) {}
    void forward(Backend& backend, const Pass& pass, const float* x, float* y) override {
        backend.conv2d_forward(shape_, pass.n, x, weight(pass), bias(pass), y);
    }
    void backward_data(Backend& backend, const Pass& pass, const float*, const float*,
                       const float* dy, float* dx) override {
        backend.conv2d_backward_data(shape_, pass.n, dy, weight(pass), dx);
    }
    void backward_weights(Backend& backend, const Pass& pass, const float* x,
                          const float* dy) override {
        backend.conv2d_backward_weights(shape_, pass.n, x, dy, weight_gradient(pass),
                                        bias_gradient(pass));
    }
    void prepare(Backend& backend, int n, bool training) override {
        backend.prepare_conv2d(name, shape_, n, training);
    }

 private:
    const Conv2dShape shape_;
};

class Linear final : public WeightedLayer {
 public:
    Linear(const std::string& layer_name, const Shape& in_shape, const LinearShape& shape)
        : WeightedLayer(layer_name, in_shape, {shape.out_features, 1, 1},
                        {shape.out_features, shape.in_features}),
          shape_(shape) {}
    void forward(Backend& backend, const Pass& pass, const float* x, float* y) override {
        backend.linear_forward(shape_, pass.n, x, weight(pass), bias(pass), y);
    }
    void backward_data(Backend& backend, const Pass& pass, const float*, const float*,
                       const float* dy, float* dx) override {
        backend.linear_backward_data(shape_, pass.n, dy, weight(pass), dx);
    }
    void backward_weights(Backend& backend, const Pass& pass, const float* x,
                          const float* dy) override {
        backend.linear_backward_weights(shape_, pass.n, x, dy, weight_gradient(pass),
                                        bias_gradient(pass));
    }
    bool factored() const override { return true; }
    void prepare(Backend& backend, int n, bool training) override {
        backend.prepare_linear(name, shape_, n, training);
    }

 private:
    const LinearShape shape_;
};

class MaxPool2d final : public Layer {
 public:
    MaxPool2d(const std::string& layer_name, const MaxPool2dShape& shape, Backend& backend,
              int train_batch)
        : Layer(layer_name, shape.in, shape.out()),
          shape_(shape),
          argmax_(backend, backend.activation_elems(shape.out(), train_batch)) {}
    void forward(Backend& backend, const Pass& pass, const float* x, float* y) override {
        backend.maxpool2d_forward(shape_, pass.n, x, y, pass.training ? argmax_.get() : nullptr);
    }
    void backward_data(Backend& backend, const Pass& pass, const float* x, const float*,
                       const float* dy, float* dx) override {
        backend.maxpool2d_backward(shape_, pass.n, x, argmax_.get(), dy, dx);
    }
    void prepare(Backend& backend, int n, bool training) override {
        backend.prepare_maxpool2d(name, shape_, n, training);
    }

 private:
    const MaxPool2dShape shape_;
    DeviceBuffer<std::uint8_t> argmax_;
};

// Works in place. A dropout after it may zero some of y: there dy is zero as well, so the mask
// y > 0 still gives the right gradient.
class Relu final : public Layer {
 public:
    Relu(const std::string& layer_name, const Shape& shape) : Layer(layer_name, shape, shape) {}
    void forward(Backend& backend, const Pass& pass, const float*, float* y) override {
        backend.relu_forward(in, pass.n, y);
    }
    void backward_data(Backend& backend, const Pass& pass, const float*, const float* y,
                       const float*, float* dx) override {
        backend.relu_backward(in, pass.n, y, dx);
    }
    bool in_place() const override { return true; }
};

// Works in place and keeps no mask: the backward pass draws the same random numbers again.
class Dropout final : public Layer {
 public:
    Dropout(const std::string& layer_name, const Shape& shape, std::uint32_t index,
            float probability, bool by_channel)
        : Layer(layer_name, shape, shape),
          index_(index),
          probability_(probability),
          by_channel_(by_channel) {}
    void forward(Backend& backend, const Pass& pass, const float*, float* y) override {
        if (pass.training) {
            apply(backend, pass, y);
        }
    }
    void backward_data(Backend& backend, const Pass& pass, const float*, const float*, const float*,
                       float* dx) override {
        apply(backend, pass, dx);
    }
    bool in_place() const override { return true; }

 private:
    void apply(Backend& backend, const Pass& pass, float* x) {
        const RandomStream stream{pass.seed, RandomPurpose::dropout, index_, 0};
        backend.dropout({stream, pass.epoch, pass.samples, in, probability_, by_channel_}, pass.n,
                        x);
    }
    const std::uint32_t index_;
    const float probability_;
    const bool by_channel_;
};

std::string text_of(const Shape& shape) {
    return shape.height == 1 && shape.width == 1
               ? fmt::format("[{}]", shape.channels)
               : fmt::format("[{}, {}, {}]", shape.channels, shape.height, shape.width);
}

}  // namespace

std::vector<std::unique_ptr<Layer>> make_layers(Backend& backend, const ModelSpec& model,
                                                const Shape& input, int classes, int train_batch,
                                                bool dropout) {
    std::vector<std::unique_ptr<Layer>> layers;
    Shape shape = input;
    bool flat = false;
    int convs = 0, linears = 0, pools = 0, relus = 0, dropouts = 0;
    for (const LayerSpec& spec : model.layers) {
        const auto fail = [&](const std::string& why) {
            throw input_error(
                fmt::format("model {}, line {}, layer '{}': {} (its input is {}, the "
                            "images are {})",
                            model.name, spec.line, spec.text, why, text_of(shape), text_of(input)));
        };
        const auto require_planes = [&] {
            if (flat) {
                fail("it needs channels, rows and columns, but its input is flat");
            }
        };
        const auto flatten = [&] {
            if (shape.elems() > (1 << 30)) {
                fail("its input has too many elements");
            }
            shape = {static_cast<int>(shape.elems()), 1, 1};
            flat = true;
        };
        const auto append = [&](std::unique_ptr<Layer> layer) {
            shape = layer->out;
            layers.push_back(std::move(layer));
        };
        switch (spec.kind) {
            case LayerKind::conv: {
                require_planes();
                const Conv2dShape conv{shape, spec.out, spec.kernel, spec.stride, spec.padding};
                if (conv.out().height < 1 || conv.out().width < 1) {
                    fail(fmt::format(
                        "its {0} x {0} window with padding {1} is larger than its input",
                        spec.kernel, spec.padding));
                }
                append(std::make_unique<Conv2d>(fmt::format("conv{}", ++convs), conv));
                break;
            }
            case LayerKind::maxpool: {
                require_planes();
                const MaxPool2dShape pool{shape, spec.kernel, spec.stride};
                if (pool.out().height < 1 || pool.out().width < 1) {
                    fail(fmt::format("its {0} x {0} window is larger than its input", spec.kernel));
                }
                if (spec.kernel > 15) {
                    fail("windows of more than 15 x 15 are not supported");
                }
                append(std::make_unique<MaxPool2d>(fmt::format("pool{}", ++pools), pool, backend,
                                                   train_batch));
                break;
            }
            case LayerKind::linear: {
                flatten();
                const LinearShape linear{shape.channels, spec.out == 0 ? classes : spec.out};
                append(std::make_unique<Linear>(fmt::format("fc{}", ++linears), shape, linear));
                break;
            }
            case LayerKind::relu:
                append(std::make_unique<Relu>(fmt::format("relu{}", ++relus), shape));
                break;
            case LayerKind::dropout2d:
                require_planes();
                [[fallthrough]];
            case LayerKind::dropout:
                ++dropouts;
                if (dropout && spec.probability > 0.0f) {
                    append(std::make_unique<Dropout>(fmt::format("dropout{}", dropouts), shape,
                                                     static_cast<std::uint32_t>(dropouts),
                                                     spec.probability,
                                                     spec.kind == LayerKind::dropout2d));
                }
                break;
            case LayerKind::flatten:
                flatten();
                break;
            case LayerKind::log_softmax:
                break;
        }
    }
    if (linears + convs == 0) {
        throw input_error(
            fmt::format("model {}: it has nothing to learn; add a conv or linear "
                        "layer",
                        model.name));
    }
    if (shape.elems() != classes) {
        throw input_error(
            fmt::format("model {}: its output is {}, but the data set has {} classes; "
                        "end it with 'linear classes'",
                        model.name, text_of(shape), classes));
    }
    return layers;
}

}  // namespace gyre::model
