// The graph of a net: its operations with their inputs, shapes and parameters, before anything is
// made on a device. Passes over it, such as fusing, turn one graph into another.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "kernels/ops/specs.hpp"
#include "model/spec.hpp"

namespace gyre::model {

// How a parameter begins, from the stream (seed, init, index of the parameter).
enum class Init {
    fan_in_uniform,   // U(-1/sqrt(fan_in), 1/sqrt(fan_in)): PyTorch's default for Conv2d and Linear
    kaiming_normal,   // N(0, 2 / fan_in): He et al., ICCV 2015, for layers before a ReLU
    kaiming_uniform,  // U(-sqrt(6 / fan_in), sqrt(6 / fan_in)), of the same variance
    dirac,            // as fan_in_uniform, but the first filters each pass on a channel
    zeros,
    ones
};

// A named piece of the flat parameter buffer, and the same piece of the gradient buffer.
struct Parameter {
    std::string name;                 // as in PyTorch's state_dict: conv1.weight, fc1.bias
    std::vector<std::int64_t> shape;  // in PyTorch's order
    std::int64_t offset_elems = 0;    // filled in by the net
    std::int64_t elems = 0;
    std::int64_t fan_in = 1;
    Init init = Init::fan_in_uniform;
    // As initialised for ever, 0 or 1: there for kernels, but not trained, counted or in files.
    bool fixed = false;
};

// A layer's tensors, besides its spec; names without the layer's.
struct LayerTensors {
    std::vector<Parameter> parameters = {}, state = {};
};
// The parameters of a layer with a weight of this shape, its outputs first. bias: whether it is
// trained.
LayerTensors weight_and_bias(const std::vector<std::int64_t>& weight_shape, bool bias = true);

// One operation. Its output is the value of the same number.
struct Node {
    static constexpr int kInput = -1;  // the value that is the net's input

    std::string name;  // such as conv1, or conv1+pool1+relu1 where these are fused
    OpSpec spec;
    std::vector<int> inputs = {};  // numbers of values, of earlier nodes
    Shape in = {}, out = {};       // of the first input, and of the output
    std::vector<Parameter> parameters = {};
    std::vector<Parameter> state = {};  // without gradients; saved and loaded with the parameters
    std::vector<Node> parts = {};       // what a fused node was made of, each the next one's input

    // True if the gradients of the parameters follow from x and dy of all images only, by a
    // product over the images.
    bool factored() const { return std::holds_alternative<LinearSpec>(spec); }
};

struct Graph {
    std::vector<Node>
        nodes;  // in an order in which they can run; the last one's output is the net's
};

// The parameters that are trained, and then the state.
std::vector<Parameter> tensors_of(const Graph& graph);

// The net of a model for images of this shape; flatten and log-softmax need no operation. dropout =
// false leaves the dropout layers out. Throws Error(bad_input) naming the layer and the shapes that
// do not fit.
Graph build_graph(const ModelSpec& model, const Shape& input, int classes, bool dropout);

// "[10, 24, 24]", or "[50]" for a vector.
std::string text_of(const Shape& shape);

// A layer's input: the output of a node, or the net's input.
struct Value {
    int number = Node::kInput;
    Shape shape;
    bool flat = false;
};

// The graph under construction, to which the layers of a model file (model/layers.cpp) append.
class GraphBuilder {
 public:
    GraphBuilder(const ModelSpec& model, const Shape& input, int classes, bool dropout)
        : model_(model),
          input_(input),
          classes_(classes),
          dropout_(dropout),
          value_{.shape = input} {}

    const Shape& shape() const { return value_.shape; }  // of the value that the next layer gets
    bool flat() const { return value_.flat; }
    int classes() const { return classes_; }
    bool dropout() const { return dropout_; }

    // Both throw if the layer cannot have this input.
    void require_planes() const;
    void flatten();
    [[noreturn]] void fail(const std::string& why) const;

    // Values by name; these throw if there is none, or one already.
    void name_value(const std::string& name);
    const Value& value(const std::string& name) const;
    void go_on_from(const std::string& name) { value_ = value(name); }

    // How many layers of this kind there are with this one: conv1, conv2, ...
    int count(const std::string& kind) { return ++counts_[kind]; }
    void append(const std::string& kind, const OpSpec& spec, LayerTensors tensors = {},
                std::vector<int> more_inputs = {}) {
        append_numbered(kind, count(kind), spec, std::move(tensors), std::move(more_inputs));
    }
    void append_numbered(const std::string& kind, int number, const OpSpec& spec,
                         LayerTensors tensors = {}, std::vector<int> more_inputs = {});

    // The graph, once.
    Graph finish();

 private:
    const ModelSpec& model_;
    const Shape input_;
    const int classes_;
    const bool dropout_;
    const LayerSpec* layer_ = nullptr;  // whose turn it is
    void check(const Graph& graph) const;

    Graph graph_;
    std::vector<const LayerSpec*> made_by_;  // of each node
    Value value_;
    std::map<std::string, Value> named_;
    std::map<std::string, int> counts_;
};

}  // namespace gyre::model
