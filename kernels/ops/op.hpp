// An operation of a net on a device: an object created once for a spec and the batch sizes it will
// see, with its plan and workspace. A pass allocates nothing and looks nothing up.
//
// Tensors are device memory in the backend's layout (Backend::activation_elems); parameters have
// PyTorch's shapes and order.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/data_type.hpp"
#include "kernels/ops/batch.hpp"
#include "kernels/ops/specs.hpp"
#include "kernels/ops/update_rules.hpp"

namespace gyre {

// Device memory and its element type.
struct Tensor {
    void* data = nullptr;
    DataType type = DataType::float32;

    Tensor() = default;
    Tensor(float* values) : data(values) {}  // NOLINT: implicit, as float* is a float32 tensor
    Tensor(const float* values) : data(const_cast<float*>(values)) {}
    Tensor(void* values, DataType of) : data(values), type(of) {}
    float* f32() const { return static_cast<float*>(data); }
    std::uint16_t* narrow() const { return static_cast<std::uint16_t*>(data); }  // for 16-bit types
    explicit operator bool() const { return data != nullptr; }
};

// An operation's tensors. The functions of Op say which are read and which are written.
struct OpIo {
    Tensor x{}, y{};                 // input [n][in], output [n][out]; the same memory if in place
    Tensor x2{};                     // second input, if the spec has one
    Tensor dy{}, dx{};               // gradients of y and x; the same memory if in place
    Tensor dx2{};                    // gradient of x2, if OpNeeds::writes_dx2
    void* saved = nullptr;           // kept by the forward pass for backward: OpNeeds::saved_bytes
    std::array<Tensor, 2> params{};  // such as weight and bias
    std::array<Tensor, 2> grads{};   // gradients of params
    std::array<Tensor, 2> state{};   // values without a gradient, such as running statistics
};

struct OpNeeds {
    std::size_t saved_bytes = 0;   // kept from a training pass's forward to its backward
    bool in_place = false;         // x and y share memory, and so do dx and dy
    bool backward_reads_x = true;  // if false, x may have been overwritten by then
    bool backward_reads_y = false;
    bool backward_reads_x2 = false;
    bool writes_dx2 = false;  // if false, the gradient of a second input is dy itself
    int phases = 1;           // of a forward pass; 1: forward(), more: forward_phase()
    bool together = false;    // it gains where leaves go through it together, as it can then
};

// The leaves of a training pass that go through an operation together, each with its own tensors.
struct Leaves {
    std::span<const Batch> batches;
    const OpIo* const* io;  // [batches]
};

// Where gradients of leaves are added up: the nodes of a tree (base/sum_tree.hpp), which have all
// leaves in order, each the sum of [first, last). Their sums go to flat buffers like the one that
// OpIo::grads are in, at the same places.
struct LeafSums {
    struct Node {
        int first = 0, last = 0;
        float* flat = nullptr;
    };
    std::span<const Node> nodes = {};
    const float* flat = nullptr;  // of OpIo::grads
    float* place(const Node& node, const Tensor& grad) const {
        return node.flat + (grad.f32() - flat);
    }
};

class Op {
 public:
    virtual ~Op() = default;
    virtual OpNeeds needs() const = 0;
    // Reads x and params; writes y and, in a training pass, saved.
    virtual void forward(const Batch& batch, const OpIo& io) = 0;
    // In an operation of several phases the leaves of a training pass meet: each phase is called
    // for all leaves in their order before the next one. In the backward pass backward_input()
    // comes when both functions before it were called for all leaves.
    virtual void forward_phase(const Batch& batch, const OpIo& io, int /*phase*/) {
        forward(batch, io);
    }
    // The backward pass calls the next three in this order. This one does the work that both others
    // need: it may turn dy in place into the gradient before a fused activation (reads y, saved).
    virtual void backward_begin(const Batch&, const OpIo&) {}
    // Overwrites grads (zeros if n = 0); reads x, dy, saved.
    virtual void backward_params(const Batch&, const OpIo&) {}
    // Overwrites dx; reads dy, params, saved, and x, x2 or y if needs() says so. If that writes
    // dx2, both are overwritten, except one that is null.
    virtual void backward_input(const Batch& batch, const OpIo& io) = 0;
    // If needs().together: forward(), backward_params() and backward_input() for several leaves, to
    // the same bits as one by one; but of their gradients only the sums are written.
    virtual void forward_leaves(const Leaves&) {}
    virtual void backward_params_leaves(const Leaves&, const LeafSums&) {}
    virtual void backward_input_leaves(const Leaves&) {}
    // True if backward_update() can and should replace backward_params() for this batch.
    virtual bool can_update(const Batch&) const { return false; }
    // Called after backward_input(), which reads the parameters before the update. Updates params
    // exactly as the optimizer would, bit for bit, and does not write grads. offset: the position
    // of params[0] in the flat buffers.
    virtual void backward_update(const Batch&, const OpIo&, const UpdateArgs&,
                                 std::int64_t /*offset*/) {}
};

// The batch sizes of an operation's passes: the largest, and all those for which kernels are chosen
// (if none are listed, the largest). 0: there are no such passes.
struct OpSizes {
    int train_images = 0, eval_images = 0;
    std::vector<int> train_sizes = {}, eval_sizes = {};
    int leaves = 1;  // the most in a training pass
    int most() const { return train_images > eval_images ? train_images : eval_images; }
};

class OpFactory {
 public:
    virtual ~OpFactory() = default;
    // Returns null if this factory lacks the operation; a fused spec is then built from its parts,
    // and one of a 16-bit type from the float32 operation (kernels/ops/converted_op.hpp). name: the
    // layer's, for reports. type: that of x, x2, y, dx and dy. Parameters, their gradients and
    // state are float32; the weights of convolutions and linear layers are rounded to `type` as
    // operands, while sums and the bias added to them are float32.
    virtual std::unique_ptr<Op> make(const std::string& name, const OpSpec& spec,
                                     const OpSizes& sizes, DataType type = DataType::float32) = 0;
};

}  // namespace gyre
