#include "model/onnx.hpp"

#include <fmt/format.h>

#include <set>
#include <variant>

#include "base/error.hpp"
#include "model/protobuf.hpp"

namespace gyre::model {
namespace {

using namespace protobuf;

// onnx.proto's numbers.
constexpr int kFloat = 1;                                                    // TensorProto.DataType
constexpr int kFloatType = 1, kIntType = 2, kFloatsType = 6, kIntsType = 7;  // AttributeProto's

std::string named_attribute(const char* name, int type, const std::string& value) {
    return text_field(5, text_field(1, name) + value + int_field(20, type));
}
std::string attribute(const char* name, std::int64_t value) {
    return named_attribute(name, kIntType, int_field(3, value));
}
std::string attribute(const char* name, float value) {
    return named_attribute(name, kFloatType, float_field(2, value));
}
std::string attribute(const char* name, std::initializer_list<std::int64_t> values) {
    std::string all;
    for (const std::int64_t value : values) {
        all += int_field(8, value);
    }
    return named_attribute(name, kIntsType, all);
}

// `count` times the same value.
std::string attribute(const char* name, int count, float value) {
    std::string all;
    for (int i = 0; i < count; ++i) {
        all += float_field(7, value);
    }
    return named_attribute(name, kFloatsType, all);
}

// The ONNX operator of an operation, and its attributes; a new operation without its line does
// not compile. Activations: nodes_of().
struct Operator {
    std::string type, attributes = {};
};
Operator operator_of(const Conv2dSpec& spec) {
    const Conv2dShape& s = spec.shape;
    return {"Conv", attribute("kernel_shape", {s.kernel, s.kernel}) +
                        attribute("strides", {s.stride, s.stride}) +
                        attribute("pads", {s.padding, s.padding, s.padding, s.padding})};
}
Operator operator_of(const GroupedConv2dSpec& spec) {
    Operator op = operator_of(Conv2dSpec{.shape = spec.shape});
    op.attributes += attribute("group", std::int64_t{spec.shape.groups});
    return op;
}
Operator operator_of(const LinearSpec&) {
    return {"Gemm", attribute("transB", std::int64_t{1})};
}
Operator operator_of(const MaxPool2dSpec& spec) {
    const MaxPool2dShape& s = spec.shape;
    return {"MaxPool", attribute("kernel_shape", {s.kernel, s.kernel}) +
                           attribute("strides", {s.stride, s.stride}) +
                           attribute("pads", {s.padding, s.padding, s.padding, s.padding}) +
                           (s.overhangs() ? attribute("ceil_mode", std::int64_t{1}) : "")};
}
Operator operator_of(const AvgPool2dSpec& spec) {
    return {"AveragePool", attribute("kernel_shape", {spec.kernel_height, spec.kernel_width}) +
                               attribute("strides", {spec.stride, spec.stride})};
}
Operator operator_of(const ReluSpec&) {
    return {"Relu"};
}
Operator operator_of(const DropoutSpec&) {
    return {"Identity"};
}
Operator operator_of(const BatchNorm2dSpec& spec) {
    return {"BatchNormalization", attribute("epsilon", spec.epsilon)};
}
Operator operator_of(const AddSpec&) {
    return {"Add"};
}

Operator operator_of(const MulSpec&) {
    return {"Mul"};
}
Operator operator_of(const ConcatSpec&) {
    return {"Concat", attribute("axis", std::int64_t{1})};
}

std::string node_field(const std::string& name, const Operator& op,
                       const std::vector<std::string>& inputs, const std::string& output) {
    std::string node;
    for (const std::string& input : inputs) {
        node += text_field(1, input);
    }
    return text_field(1, node + text_field(2, output) + text_field(3, name) +
                             text_field(4, op.type) + op.attributes);
}

// The nodes of an operation: one, except for activations that this opset lacks.
template <typename Spec>
std::string nodes_of(const Spec& spec, const std::string& name,
                     const std::vector<std::string>& inputs, const std::string& output) {
    return node_field(name, operator_of(spec), inputs, output);
}
std::string nodes_of(const ConcatSpec& spec, const std::string& name,
                     const std::vector<std::string>& inputs, const std::string& output) {
    return node_field(name, operator_of(spec), {inputs[1], inputs[0]}, output);
}
// A slice of the channels; or, with groups, planes with one more extent, of which two change
// places.
std::string nodes_of(const ChannelsSpec& spec, const std::string& name,
                     const std::vector<std::string>& inputs, const std::string& output) {
    const auto constant = [&](const char* suffix, std::initializer_list<std::int64_t> values) {
        return node_field(name + suffix, {"Constant", attribute("value_ints", values)}, {},
                          name + suffix);
    };
    const std::string& x = inputs.front();
    if (spec.groups == 1) {
        return constant(".starts", {spec.first}) + constant(".ends", {spec.first + spec.count}) +
               constant(".axes", {1}) +
               node_field(name, {"Slice"}, {x, name + ".starts", name + ".ends", name + ".axes"},
                          output);
    }
    const Shape& in = spec.in;
    return constant(".parted", {0, spec.groups, in.channels / spec.groups, in.height, in.width}) +
           constant(".joined", {0, in.channels, in.height, in.width}) +
           node_field(name + ".groups", {"Reshape"}, {x, name + ".parted"}, name + ".groups") +
           node_field(name + ".turns", {"Transpose", attribute("perm", {0, 2, 1, 3, 4})},
                      {name + ".groups"}, name + ".turns") +
           node_field(name, {"Reshape"}, {name + ".turns", name + ".joined"}, output);
}
// An instance normalisation of [N][groups][rest], and its result times weight plus bias as
// [N][channels][pixels]: this opset has no such operator.
std::string nodes_of(const GroupNormSpec& spec, const std::string& name,
                     const std::vector<std::string>& inputs, const std::string& output) {
    const auto part = [&](const char* suffix, const Operator& op,
                          const std::vector<std::string>& from) {
        std::vector<std::string> all;
        for (const std::string& each : from) {
            all.push_back(each.starts_with('.') ? name + each : each);
        }
        return node_field(name + suffix, op, all, name + suffix);
    };
    const auto constant = [&](const char* suffix, const std::string& value) {
        return part(suffix, {"Constant", value}, {});
    };
    return constant(".grouped_shape", attribute("value_ints", {0, spec.groups, -1})) +
           constant(".channels_shape", attribute("value_ints", {0, spec.in.channels, -1})) +
           constant(".column", attribute("value_ints", {-1, 1})) +
           constant(".ones", attribute("value_floats", spec.groups, 1.0f)) +
           constant(".zeros", attribute("value_floats", spec.groups, 0.0f)) +
           part(".shape", {"Shape"}, {inputs[0]}) +
           part(".grouped", {"Reshape"}, {inputs[0], ".grouped_shape"}) +
           part(".normal", {"InstanceNormalization", attribute("epsilon", spec.epsilon)},
                {".grouped", ".ones", ".zeros"}) +
           part(".channels", {"Reshape"}, {".normal", ".channels_shape"}) +
           part(".weights", {"Reshape"}, {inputs[1], ".column"}) +
           part(".biases", {"Reshape"}, {inputs[2], ".column"}) +
           part(".scaled", {"Mul"}, {".channels", ".weights"}) +
           part(".shifted", {"Add"}, {".scaled", ".biases"}) +
           node_field(name, {"Reshape"}, {name + ".shifted", name + ".shape"}, output);
}
std::string nodes_of(const ActivationSpec& spec, const std::string& name,
                     const std::vector<std::string>& inputs, const std::string& output) {
    const std::string& x = inputs.front();
    const auto part = [&](const char* suffix, const Operator& op,
                          const std::vector<std::string>& from) {
        return node_field(name + suffix, op, from, name + suffix);
    };
    const auto constant = [&](const char* suffix, float value) {
        return part(suffix, {"Constant", attribute("value_float", value)}, {});
    };
    const auto whole = [&](const Operator& op, const std::vector<std::string>& from) {
        return node_field(name, op, from, output);
    };
    const Operator hardsigmoid{"HardSigmoid",
                               attribute("alpha", 1.0f / 6.0f) + attribute("beta", 0.5f)};
    switch (spec.function) {
        case Activation::gelu:  // x / 2 * (1 + erf(x / sqrt(2)))
            return constant(".root", 0.707106781f) + constant(".one", 1.0f) +
                   constant(".half", 0.5f) + part(".scaled", {"Mul"}, {x, name + ".root"}) +
                   part(".erf", {"Erf"}, {name + ".scaled"}) +
                   part(".twice", {"Add"}, {name + ".erf", name + ".one"}) +
                   part(".cumulative", {"Mul"}, {name + ".twice", name + ".half"}) +
                   whole({"Mul"}, {x, name + ".cumulative"});
        case Activation::silu:
            return part(".sigmoid", {"Sigmoid"}, {x}) + whole({"Mul"}, {x, name + ".sigmoid"});
        case Activation::relu6:
            return constant(".zero", 0.0f) + constant(".six", 6.0f) +
                   whole({"Clip"}, {x, name + ".zero", name + ".six"});
        case Activation::sigmoid:
            return whole({"Sigmoid"}, {x});
        case Activation::hardsigmoid:
            return whole(hardsigmoid, {x});
        case Activation::hardswish:
            return part(".gate", hardsigmoid, {x}) + whole({"Mul"}, {x, name + ".gate"});
        case Activation::leaky_relu:
            break;
    }
    return whole({"LeakyRelu", attribute("alpha", spec.slope)}, {x});
}

// The nodes of a GraphProto. A value is [N][C][H][W], or [N][features] from the first Gemm or
// Flatten on.
class Nodes {
 public:
    explicit Nodes(const Graph& graph) : graph_(graph), flat_(graph.nodes.size()) {
        for (std::size_t i = 0; i < graph.nodes.size(); ++i) {
            add(i);
        }
    }
    std::string take() { return std::move(text_); }

 private:
    void add(std::size_t i) {
        const Node& node = graph_.nodes[i];
        // Added tensors must have the same rank, or one would be broadcast.
        flat_[i] = std::holds_alternative<LinearSpec>(node.spec);
        for (const int input : node.inputs) {
            flat_[i] = flat_[i] || is_flat(input);
        }
        std::vector<std::string> inputs;
        for (const int input : node.inputs) {
            inputs.push_back(value(input, flat_[i]));
        }
        for (const auto* list : {&node.parameters, &node.state}) {
            for (const Parameter& parameter : *list) {
                if (!parameter.fixed) {
                    inputs.push_back(parameter.name);
                } else if (node.parameters.front().fixed) {  // else only a bias, left out
                    const float value = parameter.init == Init::ones ? 1.0f : 0.0f;
                    const auto count = static_cast<int>(parameter.elems);
                    inputs.push_back(parameter.name);
                    text_ += node_field(parameter.name,
                                        {"Constant", attribute("value_floats", count, value)}, {},
                                        parameter.name);
                }
            }
        }
        const bool last = i + 1 == graph_.nodes.size();
        const std::string output = last && flat_[i] ? "logits" : node.name;
        text_ += std::visit(
            [&](const auto& spec) { return nodes_of(spec, node.name, inputs, output); }, node.spec);
        if (last && !flat_[i]) {
            text_ += node_field("flatten", {"Flatten"}, {output}, "logits");
        }
    }
    bool is_flat(int number) const {
        return number != Node::kInput && flat_[static_cast<std::size_t>(number)];
    }
    // Its name, after a Flatten if that is needed.
    std::string value(int number, bool flat) {
        std::string name =
            number == Node::kInput ? "input" : graph_.nodes[static_cast<std::size_t>(number)].name;
        if (!flat || is_flat(number)) {
            return name;
        }
        const std::string flattened = name + ".flat";
        if (flattened_.insert(flattened).second) {
            text_ += node_field(flattened, {"Flatten"}, {name}, flattened);
        }
        return flattened;
    }

    const Graph& graph_;
    std::vector<bool> flat_;
    std::set<std::string> flattened_;
    std::string text_;
};

std::string tensor_field(const HostTensor& tensor) {
    std::string text;
    for (const std::int64_t extent : tensor.shape) {
        text += int_field(1, extent);
    }
    text += int_field(2, kFloat) + text_field(8, tensor.name);
    static_assert(std::endian::native == std::endian::little);  // as raw_data is
    return text_field(5, text + text_field(9, {reinterpret_cast<const char*>(tensor.values.data()),
                                               tensor.values.size() * sizeof(float)}));
}

// A ValueInfoProto of float32 [N][extents].
std::string value_field(int number, const char* name, std::initializer_list<std::int64_t> extents) {
    std::string shape = text_field(1, text_field(2, "N"));
    for (const std::int64_t extent : extents) {
        shape += text_field(1, int_field(1, extent));
    }
    const std::string tensor = int_field(1, kFloat) + text_field(2, shape);
    return text_field(number, text_field(1, name) + text_field(2, text_field(1, tensor)));
}

}  // namespace

std::string onnx_model(const Graph& graph, const Shape& image,
                       const std::vector<HostTensor>& tensors,
                       const std::map<std::string, std::string>& metadata) {
    constexpr std::int64_t kIrVersion = 7, kOpset = 13;
    std::string body = Nodes(graph).take() + text_field(2, "gyre");
    for (const HostTensor& tensor : tensors) {
        body += tensor_field(tensor);
    }
    body += value_field(11, "input", {image.channels, image.height, image.width});
    body += value_field(12, "logits", {graph.nodes.back().out.elems()});
    std::string file = int_field(1, kIrVersion) + text_field(2, "gyre") + text_field(7, body) +
                       text_field(8, text_field(1, "") + int_field(2, kOpset));
    for (const auto& [key, value] : metadata) {
        file += text_field(14, text_field(1, key) + text_field(2, value));
    }
    if (file.size() >= std::size_t{1} << 31) {
        throw input_error(fmt::format(
            "the ONNX model would have {} bytes, but its format ends at 2 GiB; keep the "
            "safetensors file",
            file.size()));
    }
    return file;
}

}  // namespace gyre::model
