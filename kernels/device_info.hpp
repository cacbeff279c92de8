// What this build and this machine have to compute with, for `gyre info`.
#pragma once

#include <string>
#include <vector>

namespace gyre {

struct InfoLine {
    std::string name, value;
};

// Compiler, processor and vector width, then what is known of GPUs.
std::vector<InfoLine> device_info();

// Versions compiled in and found at run time, and the devices; says so where there are none.
std::vector<InfoLine> cuda_info();

}  // namespace gyre
