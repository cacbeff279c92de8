// An operation of a net on a device: an object made once for a spec and the numbers of images it
// will see, with its plan and workspace. A pass allocates nothing and looks nothing up.
//
// Tensors are device memory in the backend's layout (Backend::activation_elems); parameters have
// PyTorch's shapes and order.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "kernels/base/data_type.hpp"
#include "kernels/ops/batch.hpp"
#include "kernels/ops/specs.hpp"
#include "kernels/ops/step.hpp"

namespace gyre {

// Device memory with its type.
struct Tensor {
    void* data = nullptr;
    DataType type = DataType::float32;

    Tensor() = default;
    Tensor(float* values) : data(values) {}  // NOLINT: a float's address is a float32 tensor
    Tensor(const float* values) : data(const_cast<float*>(values)) {}
    Tensor(void* values, DataType of) : data(values), type(of) {}
    float* f32() const { return static_cast<float*>(data); }
    std::uint16_t* narrow() const { return static_cast<std::uint16_t*>(data); }  // of a 16-bit type
    explicit operator bool() const { return data != nullptr; }
};

// What an operation is given. Which of it is read and written: Op's functions.
struct OpIo {
    Tensor x{}, y{};        // input [n][in], output [n][out]; the same memory where in place
    Tensor x2{};            // a second input, where the spec has one
    Tensor dy{}, dx{};      // gradients of y and x; the same memory where in place
    void* saved = nullptr;  // what the forward pass keeps: OpNeeds::saved_bytes
    std::array<Tensor, 2> params{};  // such as weight, bias
    std::array<Tensor, 2> grads{};   // of params
    std::array<Tensor, 2> state{};   // values without a gradient, such as running statistics
};

struct OpNeeds {
    std::size_t saved_bytes = 0;   // kept from a training pass's forward to its backward
    bool in_place = false;         // x and y, dx and dy are the same memory
    bool backward_reads_x = true;  // else x may be gone by then
    bool backward_reads_y = false;
};

class Op {
 public:
    virtual ~Op() = default;
    virtual OpNeeds needs() const = 0;
    // Reads x, params; writes y, and in a training pass saved.
    virtual void forward(const Batch& batch, const OpIo& io) = 0;
    // The backward pass, in this order. First what both of the following need: may turn dy in place
    // into the gradient before a fused activation (reads y, saved).
    virtual void backward_begin(const Batch&, const OpIo&) {}
    // Overwrites grads, with zeros for n = 0; reads x, dy, saved.
    virtual void backward_params(const Batch&, const OpIo&) {}
    // Overwrites dx; reads dy, params, saved, and x or y where needs() says so.
    virtual void backward_input(const Batch& batch, const OpIo& io) = 0;
    // Whether, for such a batch, backward_update() can and should stand for backward_params().
    virtual bool can_update(const Batch&) const { return false; }
    // After backward_input(), which reads the parameters as they were: updates params as the
    // optimiser would, bit by bit, and leaves grads alone. offset: of params[0] in the flat
    // buffers.
    virtual void backward_update(const Batch&, const OpIo&, const PassUpdate&,
                                 std::int64_t /*offset*/) {}
};

// The numbers of images that passes have: the most, and all for which kernels are chosen (the most
// where none are named). 0: no such pass.
struct OpSizes {
    int train_images = 0, eval_images = 0;
    std::vector<int> train_sizes = {}, eval_sizes = {};
    int most() const { return train_images > eval_images ? train_images : eval_images; }
};

class OpFactory {
 public:
    virtual ~OpFactory() = default;
    // Null: this factory has no such operation; a fused spec is then made of its parts, and one of
    // a 16-bit type of the float32 operation (kernels/converted_op.hpp). name: the layer's, for
    // reports. type: of x, x2, y, dx and dy. Parameters, their gradients and state are float32;
    // the weights of convolutions and linear layers are rounded to `type` as operands, sums are in
    // float32, and so is the bias that is added to them.
    virtual std::unique_ptr<Op> make(const std::string& name, const OpSpec& spec,
                                     const OpSizes& sizes, DataType type = DataType::float32) = 0;
};

}  // namespace gyre
