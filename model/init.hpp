// Initial values of parameters.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "base/philox.hpp"
#include "model/graph.hpp"

namespace gyre::model {

// How the weights of convolutions and linear layers begin. The default is PyTorch's, which draws
// biases too; Kaiming's are torch.nn.init's with fan_in and ReLU's gain, and biases begin as zeros.
// dirac: as the default, but the first filters of each convolution, as many as they have channels,
// are those of torch.nn.init.dirac_: each passes one channel on (Zagoruyko, Komodakis 2017).
enum class WeightInit { automatic, kaiming_normal, kaiming_uniform, dirac };
inline const std::vector<std::pair<std::string, WeightInit>> kWeightInits = {
    {"default", WeightInit::automatic},
    {"kaiming-normal", WeightInit::kaiming_normal},
    {"kaiming-uniform", WeightInit::kaiming_uniform},
    {"dirac", WeightInit::dirac}};

Init init_of(const Parameter& parameter, WeightInit weights);

// In the parameter's order, as its `init` says.
std::vector<float> initial_values(const Parameter& parameter, const RandomStream& stream);

}  // namespace gyre::model
