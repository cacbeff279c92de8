// The pass that lets convolutions which follow each other agree on channels-last activations
// (kernels/ops/specs.hpp), where the backend has both.
#pragma once

#include "kernels/base/function_ref.hpp"
#include "model/graph.hpp"

namespace gyre::model {

// accepts(node): whether the backend can make it. After fusing.
void agree_on_layouts(Graph& graph, FunctionRef<bool(const Node&)> accepts);

}  // namespace gyre::model
