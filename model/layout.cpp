#include "model/layout.hpp"

#include <cstddef>

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

}  // namespace

void agree_on_layouts(Graph& graph, FunctionRef<bool(const Node&)> accepts) {
    for (std::size_t i = 0; i < graph.nodes.size(); ++i) {
        Node& first = graph.nodes[i];
        Node* const second = only_reader(graph, i);
        auto* const from = std::get_if<Conv2dSpec>(&first.spec);
        auto* const to = second == nullptr ? nullptr : std::get_if<Conv2dSpec>(&second->spec);
        if (from == nullptr || to == nullptr || !from->relu || from->pool_kernel > 0) {
            continue;
        }
        from->out_channels_last = to->in_channels_last = true;
        if (!accepts(first) || !accepts(*second)) {
            from->out_channels_last = to->in_channels_last = false;
        }
    }
}

}  // namespace gyre::model
