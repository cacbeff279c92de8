// Where two sets of tensors differ, to the last bit.
#pragma once

#include <string>
#include <vector>

#include "model/safetensors.hpp"

namespace gyre::model {

// A line for each tensor whose name, shape or values are not the same in both, in the order of `a`
// and then of `b`: how many values differ, the first of them, and how far apart they are in ulps
// (the number of floats from one to the other). Empty if all bits are equal.
std::vector<std::string> tensor_differences(const std::vector<HostTensor>& a,
                                            const std::vector<HostTensor>& b);

}  // namespace gyre::model
