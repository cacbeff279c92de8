// The compute resources of this build and this machine, for `gyre info`.
#pragma once

#include <string>
#include <vector>

namespace gyre {

struct InfoLine {
    std::string name, value;
};

// Compiler, processor and vector width, followed by cuda_info().
std::vector<InfoLine> device_info();

// The versions compiled with and found at run time, and the devices; says so if there are none.
std::vector<InfoLine> cuda_info();

}  // namespace gyre
