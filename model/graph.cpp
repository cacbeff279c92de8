#include "model/graph.hpp"

#include <fmt/format.h>

#include <functional>
#include <numeric>

#include "kernels/base/error.hpp"
#include "model/layers.hpp"

namespace gyre::model {

std::string text_of(const Shape& shape) {
    return shape.height == 1 && shape.width == 1
               ? fmt::format("[{}]", shape.channels)
               : fmt::format("[{}, {}, {}]", shape.channels, shape.height, shape.width);
}

std::vector<Parameter> weight_and_bias(const std::vector<std::int64_t>& weight_shape) {
    const std::int64_t elems = std::accumulate(weight_shape.begin(), weight_shape.end(),
                                               std::int64_t{1}, std::multiplies<>());
    const std::int64_t outputs = weight_shape.front(), fan_in = elems / outputs;
    return {{.name = "weight", .shape = weight_shape, .elems = elems, .fan_in = fan_in},
            {.name = "bias", .shape = {outputs}, .elems = outputs, .fan_in = fan_in}};
}

void GraphBuilder::fail(const std::string& why) const {
    throw input_error(fmt::format(
        "model {}, line {}, layer '{}': {} (its input is {}, the images are {})", model_.name,
        layer_->line, layer_->text, why, text_of(shape_), text_of(input_)));
}

void GraphBuilder::require_planes() const {
    if (flat_) {
        fail("it needs channels, rows and columns, but its input is flat");
    }
}

void GraphBuilder::flatten() {
    if (shape_.elems() > (1 << 30)) {
        fail("its input has too many elements");
    }
    shape_ = {static_cast<int>(shape_.elems()), 1, 1};
    flat_ = true;
}

void GraphBuilder::append_numbered(const std::string& kind, int number, const OpSpec& spec,
                                   std::vector<Parameter> parameters) {
    Node node{.name = fmt::format("{}{}", kind, number),
              .spec = spec,
              .inputs = {value_},
              .in = shape_,
              .out = std::visit([](const auto& s) { return s.out(); }, spec),
              .parameters = std::move(parameters)};
    for (Parameter& parameter : node.parameters) {
        parameter.name = node.name + "." + parameter.name;
    }
    shape_ = node.out;
    value_ = static_cast<int>(graph_.nodes.size());
    graph_.nodes.push_back(std::move(node));
}

Graph GraphBuilder::finish(std::vector<LayerSpec>::const_iterator begin,
                           std::vector<LayerSpec>::const_iterator end) {
    for (; begin != end; ++begin) {
        layer_ = &*begin;
        layer_->type->build(*this, *layer_);
    }
    bool learns = false;
    for (const Node& node : graph_.nodes) {
        learns = learns || !node.parameters.empty();
    }
    if (!learns) {
        throw input_error(fmt::format(
            "model {}: it has nothing to learn; add a conv or linear layer", model_.name));
    }
    if (shape_.elems() != classes_) {
        throw input_error(
            fmt::format("model {}: its output is {}, but the data set has {} classes; "
                        "end it with 'linear classes'",
                        model_.name, text_of(shape_), classes_));
    }
    return std::move(graph_);
}

Graph build_graph(const ModelSpec& model, const Shape& input, int classes, bool dropout) {
    return GraphBuilder(model, input, classes, dropout)
        .finish(model.layers.begin(), model.layers.end());
}

}  // namespace gyre::model
