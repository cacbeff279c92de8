// Which tensors of a weights file become which parameters of a net, also where PyTorch code named
// them differently.
#pragma once

#include <string>
#include <vector>

#include "model/graph.hpp"
#include "model/safetensors.hpp"

namespace gyre::model {

struct ParameterMatch {
    // For each parameter the index of its tensor; the number of tensors if it has none.
    std::vector<std::size_t> tensors;
    std::vector<std::string> remarks;  // what was not taken as it was; none as a rule
};

// Layers whose names agree are taken as they are, after the prefixes that PyTorch's wrappers put
// before all names (`module.`, `_orig_mod.`). The others, such as `fc` or an nn.Sequential's
// (`0.weight`, `conv.3.bias`), are matched by their shapes and, among equal ones, by the numbers in
// their names; these must leave no choice. finetune: layers that nothing in the file fits have no
// tensors, and what fits no layer is not used; the remarks name both. Throws Error(bad_input), with
// the names and shapes of both sides, for anything else; `source` says where the tensors come from.
ParameterMatch match_parameters(const std::vector<Parameter>& parameters,
                                const std::vector<HostTensor>& tensors, const std::string& source,
                                bool finetune = false);

}  // namespace gyre::model
