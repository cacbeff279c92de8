#include "model/fuse.hpp"

#include <cmath>
#include <optional>

namespace gyre::model {
namespace {

// The spec that does what `first` does and then `next`; none: they stay apart.
std::optional<OpSpec> fused(const OpSpec& first, const OpSpec& next) {
    if (auto* of_conv = std::get_if<Conv2dSpec>(&first)) {
        Conv2dSpec conv = *of_conv;
        if (std::holds_alternative<ReluSpec>(next) && !conv.relu) {
            conv.relu = true;
            return conv;
        }
        const auto* pool = std::get_if<MaxPool2dSpec>(&next);
        if (pool != nullptr && conv.pool_kernel == 0 && !pool->shape.clips()) {
            conv.pool_kernel = pool->shape.kernel;
            conv.pool_stride = pool->shape.stride;
            return conv;
        }
        const auto* dropout = std::get_if<DropoutSpec>(&next);
        if (dropout != nullptr && dropout->by_channel && conv.dropout == 0.0f) {
            conv.dropout = dropout->probability;
            conv.dropout_stream = dropout->stream;
            return conv;
        }
    }
    if (auto* of_linear = std::get_if<LinearSpec>(&first)) {
        LinearSpec linear = *of_linear;
        if (std::holds_alternative<ReluSpec>(next) && !linear.relu) {
            linear.relu = true;
            return linear;
        }
    }
    return std::nullopt;
}

// Dropout by itself gains nothing: it works in place, and would cost the others a gradient buffer.
bool pays(const OpSpec& spec) {
    const auto* conv = std::get_if<Conv2dSpec>(&spec);
    return conv == nullptr || conv->relu || conv->pool_kernel > 0;
}

std::vector<int> readers_of_values(const Graph& graph) {
    std::vector<int> readers(graph.nodes.size(), 0);
    for (const Node& node : graph.nodes) {
        for (const int input : node.inputs) {
            if (input != Node::kInput) {
                ++readers[static_cast<std::size_t>(input)];
            }
        }
    }
    return readers;
}

// Nodes one by one, whose inputs are numbers of the old graph's values.
class Renumbered {
 public:
    explicit Renumbered(std::size_t values) : number_(values, Node::kInput) {}

    // `value`: of the old graph, that the node computes.
    void append(Node node, std::size_t value) {
        for (int& input : node.inputs) {
            input = input == Node::kInput ? input : number_[static_cast<std::size_t>(input)];
        }
        graph.nodes.push_back(std::move(node));
        number_[value] = static_cast<int>(graph.nodes.size()) - 1;
    }
    Graph graph;

 private:
    std::vector<int> number_;
};

}  // namespace

Graph fuse(const Graph& graph) {
    const std::vector<int> readers = readers_of_values(graph);
    Renumbered result(graph.nodes.size());
    for (std::size_t i = 0; i < graph.nodes.size(); ++i) {
        Node node = graph.nodes[i];
        std::vector<Node> parts{node};
        std::size_t last = i;
        while (last + 1 < graph.nodes.size() && readers[last] == 1) {
            const Node& next = graph.nodes[last + 1];
            const bool follows =
                next.inputs.size() == 1 && next.inputs.front() == static_cast<int>(last);
            const auto spec = follows ? fused(node.spec, next.spec) : std::nullopt;
            if (!spec) {
                break;
            }
            node.spec = *spec;
            node.name += "+" + next.name;
            node.out = next.out;
            parts.push_back(next);
            ++last;
        }
        if (parts.size() > 1 && pays(node.spec)) {
            node.parts = std::move(parts);
            result.append(std::move(node), last);
            i = last;
        } else {
            result.append(graph.nodes[i], i);
        }
    }
    return std::move(result.graph);
}

Graph fold_batchnorms(const Graph& graph, std::vector<Fold>& folds) {
    const std::vector<int> readers = readers_of_values(graph);
    Renumbered result(graph.nodes.size());
    for (std::size_t i = 0; i < graph.nodes.size(); ++i) {
        Node node = graph.nodes[i];
        const bool weighs = std::holds_alternative<Conv2dSpec>(node.spec) ||
                            std::holds_alternative<GroupedConv2dSpec>(node.spec) ||
                            std::holds_alternative<LinearSpec>(node.spec);
        const bool alone = i + 1 < graph.nodes.size() && readers[i] == 1;
        const Node* const next = alone ? &graph.nodes[i + 1] : nullptr;
        const auto* norm = next == nullptr ? nullptr : std::get_if<BatchNorm2dSpec>(&next->spec);
        if (weighs && norm != nullptr && next->inputs.front() == static_cast<int>(i)) {
            folds.push_back({node.name, next->name, norm->epsilon});
            node.name += "+" + next->name;
            node.parameters.back().fixed = false;  // the bias
            ++i;
        }
        result.append(std::move(node), i);
    }
    return std::move(result.graph);
}

std::map<std::string, std::vector<float>> folded_values(
    const std::vector<Fold>& folds,
    FunctionRef<const std::vector<float>*(const std::string& name)> find) {
    std::map<std::string, std::vector<float>> values;
    for (const Fold& fold : folds) {
        const std::vector<float>& mean = *find(fold.norm + ".running_mean");
        const std::vector<float>& variance = *find(fold.norm + ".running_var");
        const auto all = [&](const std::string& name, float untrained) {
            const std::vector<float>* const found = find(name);
            return found != nullptr ? *found : std::vector<float>(mean.size(), untrained);
        };
        std::vector<float> weight = *find(fold.layer + ".weight");
        std::vector<float> bias = all(fold.layer + ".bias", 0.0f);
        const std::vector<float> norm_weight = all(fold.norm + ".weight", 1.0f);
        const std::vector<float> norm_bias = all(fold.norm + ".bias", 0.0f);
        const std::size_t row = weight.size() / mean.size();
        for (std::size_t o = 0; o < mean.size(); ++o) {
            const double scale =
                double{norm_weight[o]} / std::sqrt(double{variance[o]} + double{fold.epsilon});
            for (std::size_t i = o * row; i < (o + 1) * row; ++i) {
                weight[i] = static_cast<float>(double{weight[i]} * scale);
            }
            bias[o] = static_cast<float>((double{bias[o]} - double{mean[o]}) * scale +
                                         double{norm_bias[o]});
        }
        values[fold.layer + ".weight"] = std::move(weight);
        values[fold.layer + ".bias"] = std::move(bias);
    }
    return values;
}

Graph fuse_dropout(const Graph& graph, FunctionRef<bool(const Node&)> accepts) {
    const std::vector<int> readers = readers_of_values(graph);
    Renumbered result(graph.nodes.size());
    for (std::size_t i = 0; i < graph.nodes.size(); ++i) {
        Node node = graph.nodes[i];
        auto* const linear = std::get_if<LinearSpec>(&node.spec);
        const bool alone = i + 1 < graph.nodes.size() && readers[i] == 1;
        const Node* const next = alone ? &graph.nodes[i + 1] : nullptr;
        const auto* dropout = next == nullptr ? nullptr : std::get_if<DropoutSpec>(&next->spec);
        if (linear != nullptr && linear->relu && dropout != nullptr && !dropout->by_channel &&
            next->inputs.front() == static_cast<int>(i)) {
            if (node.parts.empty()) {
                node.parts.push_back(graph.nodes[i]);
            }
            linear->dropout = dropout->probability;
            linear->dropout_stream = dropout->stream;
            node.name += "+" + next->name;
            node.parts.push_back(*next);
            if (accepts(node)) {
                result.append(std::move(node), ++i);
                continue;
            }
        }
        result.append(graph.nodes[i], i);
    }
    return std::move(result.graph);
}

Graph split(const Graph& graph, std::size_t index) {
    Renumbered result(graph.nodes.size());
    for (std::size_t i = 0; i < graph.nodes.size(); ++i) {
        if (i != index) {
            result.append(graph.nodes[i], i);
            continue;
        }
        Node first = graph.nodes[i].parts.front();
        first.inputs = graph.nodes[i].inputs;
        for (std::size_t part = 0; part < graph.nodes[i].parts.size(); ++part) {
            Node node = part == 0 ? first : graph.nodes[i].parts[part];
            if (part > 0) {
                node.inputs = {static_cast<int>(i)};  // the part before, as numbered last
            }
            result.append(std::move(node), i);
        }
    }
    return std::move(result.graph);
}

}  // namespace gyre::model
