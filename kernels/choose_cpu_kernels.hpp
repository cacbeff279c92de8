// The CPU's kernels are compiled once for each instruction set that a processor of this kind may
// have. The best one supported is chosen at the start.
#pragma once

#include <memory>
#include <vector>

#include "kernels/cpu/cpu_kernels.hpp"

namespace gyre {

// The kernels that this processor can run, best first.
std::vector<const CpuKernels*> available_cpu_kernels();
// The best, or those that GYRE_CPU names. Throws Error (usage) if this processor cannot run them.
const CpuKernels& chosen_cpu_kernels();

// threads: workers inside this process, >= 1.
std::unique_ptr<Backend> make_cpu_backend(const CpuKernels& kernels, int threads);

}  // namespace gyre
