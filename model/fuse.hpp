// The pass that fuses operations: a convolution with the dropout2d, max-pooling and ReLU that
// follow it, a linear layer with its ReLU.
//
// These three commute: max-pooling picks an element and ReLU is monotone; a dropout2d factor is
// >= 0 and the same for a whole window, and rounding is monotone, too. So any order of them, each
// at most once, is the one fused operation, with bitwise the same outputs. Of gradients one case
// differs: where scaling by the factor rounds two unequal values of a window to the same number,
// the fused form gives the gradient to the larger, the parts to the first.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "base/function_ref.hpp"
#include "model/graph.hpp"

namespace gyre::model {

Graph fuse(const Graph& graph);

// A batchnorm that is part of the layer before it; names of nodes.
struct Fold {
    std::string layer, norm;
    float epsilon;
};
// The graph in which each batchnorm is part of the convolution or linear layer before it, if
// nothing else reads that: for a net that only evaluates. Before fuse().
Graph fold_batchnorms(const Graph& graph, std::vector<Fold>& folds);
// The weights and biases of such layers by their names (Jacob et al., CVPR 2018, section 3.2), in
// float64 and rounded once:
//   weight[o] * s[o],  (bias[o] - mean[o]) * s[o] + bias_of_norm[o],
//   s = weight_of_norm / sqrt(variance + epsilon).
// find: the values of a tensor; nullptr: it is not trained.
std::map<std::string, std::vector<float>> folded_values(
    const std::vector<Fold>& folds,
    FunctionRef<const std::vector<float>*(const std::string& name)> find);

// Linear layers with a ReLU and the dropout that follows, where the backend has them as one.
// accepts(node): whether it can make it.
Graph fuse_dropout(const Graph& graph, FunctionRef<bool(const Node&)> accepts);

// The graph with node `index` replaced by what it was fused from.
Graph split(const Graph& graph, std::size_t index);

}  // namespace gyre::model
