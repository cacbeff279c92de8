// Initial values of parameters.
#pragma once

#include <vector>

#include "kernels/base/philox.hpp"
#include "model/graph.hpp"

namespace gyre::model {

// In the parameter's order, as its `init` says.
std::vector<float> initial_values(const Parameter& parameter, const RandomStream& stream);

}  // namespace gyre::model
