// Declarations shared by the kernel benchmarks of the CPU and of GPUs: the layers and the options.
#pragma once

#include <cstdint>
#include <string>
#include <variant>
#include <vector>

#include "base/data_type.hpp"
#include "kernels/ops/specs.hpp"

namespace gyre::bench {

struct GatherWork {
    Shape shape;
};
struct ConvWork {
    Conv2dShape shape;
    bool input_gradient = true;
};
struct PoolWork {
    MaxPool2dShape shape;
};
struct AvgPoolWork {
    AvgPool2dSpec spec;
};
struct ReluWork {
    Shape shape;
};
struct BatchNormWork {
    Shape shape;
};
struct AddWork {
    Shape shape;
};
struct DropoutWork {
    Shape shape;
    bool by_channel = false;
};
struct LinearWork {
    LinearShape shape;
};
struct LossWork {
    int classes = 10;
};
// Work on all parameters at once, such as an optimiser's, independent of the batch.
struct ParameterWork {
    std::int64_t elems = 0;
};
using Work = std::variant<GatherWork, ConvWork, PoolWork, AvgPoolWork, ReluWork, BatchNormWork,
                          AddWork, DropoutWork, LinearWork, LossWork, ParameterWork>;

struct Layer {
    std::string name;
    Work work;
};
struct Net {
    std::string name;
    std::vector<Layer> layers;
};
// Returns the built-in nets (model/spec.cpp) on images of 28 x 28. `resnet` has only the kinds of
// layers that the others lack, each shape once.
const std::vector<Net>& nets();

struct Options {
    std::string device = "auto";
    std::vector<int> batches;  // empty: the device's defaults
    bool tf32 = false;
    DataType type = DataType::float32;  // of activations, with `step`
    bool graph = true;                  // GPU: time replays of a CUDA graph instead of plain calls
    bool check = false;                 // exit with 3 if a goal is missed
    // Only for the emulator:
    bool profile = false;      // count what kernels do instead of timing them
    std::string step;          // a model: list the launches of its step
    std::string gpu = "h200";  // GPU of `profile` and `step`
    std::string resources;     // folder of ptxas' reports; empty: none
};

// All return the program's exit code.
int run_on_cpu(const Options& options);

}  // namespace gyre::bench

// bench/kernels_gpu.cpp, for a GPU and for the emulator
namespace gyre::cuda {
int run_benchmarks(const bench::Options& options);
}
namespace gyre::emulated {
int run_benchmarks(const bench::Options& options);
}
