#include "model/layout.hpp"

#include <cstddef>

#include "kernels/ops/dropout.hpp"

namespace gyre::model {
namespace {

// The only node that reads this value, if it reads nothing else; or null.
Node* only_reader(Graph& graph, std::size_t value) {
    Node* reader = nullptr;
    for (Node& node : graph.nodes) {
        for (const int input : node.inputs) {
            if (input == static_cast<int>(value)) {
                if (reader != nullptr || node.inputs.size() != 1) {
                    return nullptr;
                }
                reader = &node;
            }
        }
    }
    return reader;
}

// Each returns whether these can agree, and does so.
bool agree(Conv2dSpec& first, Conv2dSpec& second) {
    first.out_channels_last = second.in_channels_last = first.relu && first.pool_kernel == 0;
    return first.out_channels_last;
}
bool agree(LinearSpec& first, LinearSpec& second) {
    first.dy_masked = first.relu;
    second.dx_factor = first.relu ? kept_factor(first.dropout) : 0.0f;
    return second.dx_factor > 0.0f;
}
bool agree(OpSpec& first, OpSpec& second) {
    if (first.index() != second.index()) {
        return false;
    }
    if (auto* conv = std::get_if<Conv2dSpec>(&first)) {
        return agree(*conv, std::get<Conv2dSpec>(second));
    }
    auto* linear = std::get_if<LinearSpec>(&first);
    return linear != nullptr && agree(*linear, std::get<LinearSpec>(second));
}

}  // namespace

void agree_on_layouts(Graph& graph, FunctionRef<bool(const Node&)> accepts) {
    for (std::size_t i = 0; i < graph.nodes.size(); ++i) {
        Node& first = graph.nodes[i];
        Node* const second = only_reader(graph, i);
        if (second == nullptr) {
            continue;
        }
        const OpSpec apart[] = {first.spec, second->spec};
        if (!agree(first.spec, second->spec) || !accepts(first) || !accepts(*second)) {
            first.spec = apart[0];
            second->spec = apart[1];
        }
    }
}

}  // namespace gyre::model
