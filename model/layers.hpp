// The layers of a net. A layer knows its shapes and its parameters' place; the backend computes.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "kernels/backend.hpp"
#include "model/spec.hpp"

namespace gyre::model {

// A named piece of the flat parameter buffer, and the same piece of the gradient buffer.
struct Parameter {
    std::string name;                 // as in PyTorch's state_dict: conv1.weight, fc1.bias
    std::vector<std::int64_t> shape;  // in PyTorch's order
    std::int64_t offset_elems = 0;
    std::int64_t elems = 0;
    std::int64_t fan_in = 1;  // bounds the initial values: U(-1/sqrt(fan_in), 1/sqrt(fan_in))
};

// One pass of one batch through a net.
struct Pass {
    int n = 0;                              // images
    const std::int32_t* samples = nullptr;  // [n] on the device: their indices in the data set
    std::uint64_t seed = 0;
    const std::uint32_t* epoch = nullptr;  // on the device; null: 0
    bool training = false;                 // dropout is active, and a backward pass may follow
    const float* parameters = nullptr;
    float* gradients = nullptr;
};

class Layer {
 public:
    Layer(std::string name_, const Shape& in_, const Shape& out_)
        : name(std::move(name_)), in(in_), out(out_) {}
    virtual ~Layer() = default;

    // x [n][in], y [n][out]; the same memory for a layer that works in place.
    virtual void forward(Backend& backend, const Pass& pass, const float* x, float* y) = 0;
    // dx [n][in] from dy [n][out]; x and y as the forward pass left them, y possibly after further
    // layers that work in place.
    virtual void backward_data(Backend& backend, const Pass& pass, const float* x, const float* y,
                               const float* dy, float* dx) = 0;
    // Writes the gradients of this layer's parameters.
    virtual void backward_weights(Backend&, const Pass&, const float* /*x*/, const float* /*dy*/) {}
    // Whether the gradients of this layer's parameters follow from x and dy of all images alone, by
    // a product over the images.
    virtual bool factored() const { return false; }
    virtual bool in_place() const { return false; }
    // Announces the layer to the backend, for passes of n images.
    virtual void prepare(Backend&, int /*n*/, bool /*training*/) {}

    const std::string name;  // such as conv1
    const Shape in, out;
    std::vector<Parameter> parameters;  // offsets are filled in by the net
};

// Appends the layers of a model for images of this shape; flatten and log-softmax need none.
// dropout = false leaves the dropout layers out. Throws Error(bad_input) naming the layer and the
// shapes that do not fit.
std::vector<std::unique_ptr<Layer>> make_layers(Backend& backend, const ModelSpec& model,
                                                const Shape& input, int classes, int train_batch,
                                                bool dropout);

}  // namespace gyre::model
