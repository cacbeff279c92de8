#include "model/graph.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <functional>
#include <iterator>
#include <numeric>

#include "base/error.hpp"
#include "model/layers.hpp"

namespace gyre::model {
namespace {
constexpr std::int64_t kMostElems = 1 << 30;  // of a value, for one image
}  // namespace

std::string text_of(const Shape& shape) {
    return shape.height == 1 && shape.width == 1
               ? fmt::format("[{}]", shape.channels)
               : fmt::format("[{}, {}, {}]", shape.channels, shape.height, shape.width);
}

LayerTensors weight_and_bias(const std::vector<std::int64_t>& weight_shape, bool bias) {
    const std::int64_t elems = std::accumulate(weight_shape.begin(), weight_shape.end(),
                                               std::int64_t{1}, std::multiplies<>());
    const std::int64_t outputs = weight_shape.front(), fan_in = elems / outputs;
    return {
        .parameters = {{.name = "weight", .shape = weight_shape, .elems = elems, .fan_in = fan_in},
                       {.name = "bias",
                        .shape = {outputs},
                        .elems = outputs,
                        .fan_in = fan_in,
                        .init = bias ? Init::fan_in_uniform : Init::zeros,
                        .fixed = !bias}}};
}

void GraphBuilder::fail(const std::string& why) const {
    throw input_error(fmt::format(
        "model {}, line {}, layer '{}': {} (its input is {}, the images are {})", model_.name,
        layer_->line, layer_->text, why, text_of(shape()), text_of(input_)));
}

void GraphBuilder::require_planes() const {
    if (value_.flat) {
        fail("it needs channels, rows and columns, but its input is flat");
    }
}

void GraphBuilder::flatten() {
    if (shape().elems() > kMostElems) {
        fail("its input has more than 2^30 elements");
    }
    value_.shape = {static_cast<int>(shape().elems()), 1, 1};
    value_.flat = true;
}

void GraphBuilder::name_value(const std::string& name) {
    if (!named_.emplace(name, value_).second) {
        fail(fmt::format("there is a value '{}' already; give each its own name", name));
    }
}

const Value& GraphBuilder::value(const std::string& name) const {
    const auto found = named_.find(name);
    if (found == named_.end()) {
        fail(fmt::format("there is no value '{0}' so far; name one with 'as {0}'", name));
    }
    return found->second;
}

void GraphBuilder::append_numbered(const std::string& kind, int number, const OpSpec& spec,
                                   LayerTensors tensors, std::vector<int> more_inputs) {
    Node node{.name = fmt::format("{}{}", kind, number),
              .spec = spec,
              .inputs = std::move(more_inputs),
              .in = shape(),
              .out = std::visit([](const auto& s) { return s.out(); }, spec),
              .parameters = std::move(tensors.parameters),
              .state = std::move(tensors.state)};
    // Each layer, so that the next one's extents overflow nothing.
    if (1.0 * node.out.channels * node.out.height * node.out.width > 1.0 * kMostElems) {
        fail(fmt::format("its output {} has more than 2^30 elements", text_of(node.out)));
    }
    node.inputs.insert(node.inputs.begin(), value_.number);
    for (auto* list : {&node.parameters, &node.state}) {
        for (Parameter& parameter : *list) {
            parameter.name = node.name + "." + parameter.name;
        }
    }
    value_.shape = node.out;
    value_.number = static_cast<int>(graph_.nodes.size());
    graph_.nodes.push_back(std::move(node));
    made_by_.push_back(layer_);
}

Graph GraphBuilder::finish() {
    for (const LayerSpec& layer : model_.layers) {
        layer_ = &layer;
        layer.type->build(*this, layer);
    }
    check(graph_);
    return std::move(graph_);
}

// Something learns, every output is used, and the last one gives the classes.
void GraphBuilder::check(const Graph& graph) const {
    bool learns = false;
    std::vector<bool> used(graph.nodes.size(), false);
    for (const Node& node : graph.nodes) {
        learns = learns || std::any_of(node.parameters.begin(), node.parameters.end(),
                                       [](const Parameter& p) { return !p.fixed; });
        for (const int input : node.inputs) {
            if (input != Node::kInput) {
                used[static_cast<std::size_t>(input)] = true;
            }
        }
    }
    if (!learns) {
        throw input_error(fmt::format(
            "model {}: it has nothing to learn; add a conv or linear layer", model_.name));
    }
    for (std::size_t i = 0; i < used.size(); ++i) {
        if (!used[i] && static_cast<int>(i) != value_.number) {
            throw input_error(fmt::format(
                "model {}, line {}, layer '{}': nothing uses its output; name it with 'as' and add "
                "it somewhere, or leave it out",
                model_.name, made_by_[i]->line, made_by_[i]->text));
        }
    }
    if (shape().elems() != classes_) {
        throw input_error(
            fmt::format("model {}: its output is {}, but the data set has {} classes; "
                        "end it with 'linear classes'",
                        model_.name, text_of(shape()), classes_));
    }
    if (value_.number + 1 != static_cast<int>(graph.nodes.size())) {
        throw input_error(fmt::format("model {}: it ends with 'from', after which no layer follows",
                                      model_.name));
    }
}

std::vector<Parameter> tensors_of(const Graph& graph) {
    std::vector<Parameter> parameters, state;
    for (const Node& node : graph.nodes) {
        std::ranges::copy_if(node.parameters, std::back_inserter(parameters),
                             [](const Parameter& p) { return !p.fixed; });
        state.insert(state.end(), node.state.begin(), node.state.end());
    }
    parameters.insert(parameters.end(), state.begin(), state.end());
    return parameters;
}

Graph build_graph(const ModelSpec& model, const Shape& input, int classes, bool dropout) {
    return GraphBuilder(model, input, classes, dropout).finish();
}

}  // namespace gyre::model
