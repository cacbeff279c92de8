// The pass that lets operations which follow each other agree on what is between them
// (kernels/ops/specs.hpp), where the backend has both: convolutions on channels-last activations,
// linear layers on gradients before a ReLU.
#pragma once

#include "base/function_ref.hpp"
#include "model/graph.hpp"

namespace gyre::model {

// accepts(node): whether the backend can make it. After fusing.
void agree_on_layouts(Graph& graph, FunctionRef<bool(const Node&)> accepts);

}  // namespace gyre::model
