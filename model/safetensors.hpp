// Weights on disk in the safetensors format (https://github.com/huggingface/safetensors), readable
// by its Python package: 8 bytes little-endian header length, a JSON header, the raw tensors.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "base/function_ref.hpp"

namespace gyre::model {

struct HostTensor {
    std::string name;
    std::vector<std::int64_t> shape;
    std::vector<float> values;  // row-major
    std::string dtype = "F32";  // in the file; `values` are converted
};

// Is shown a tensor whose values stay where they are, and may be gone after the call.
using TensorVisitor =
    FunctionRef<void(const std::string& name, const std::vector<std::int64_t>& shape,
                     std::span<const float> values)>;
// Copies what a function shows a visitor.
inline std::vector<HostTensor> copies(FunctionRef<void(const TensorVisitor&)> show) {
    std::vector<HostTensor> tensors;
    show([&](const std::string& name, const std::vector<std::int64_t>& shape,
             std::span<const float> values) {
        tensors.push_back({name, shape, {values.begin(), values.end()}});
    });
    return tensors;
}

struct TensorFile {
    std::vector<HostTensor> tensors;
    std::map<std::string, std::string> metadata;
};

// Reads tensors of F32, F16, BF16 or F64. Throws Error(bad_input) naming file, offset, what was
// expected and found; for a file of torch.save or pickle, with the Python that converts it.
TensorFile read_safetensors(const std::filesystem::path& path);

// Writes F32, once for all names, as write_whole_file() does (model/whole_file.hpp).
void write_safetensors(const std::vector<std::filesystem::path>& names, const TensorFile& file);
inline void write_safetensors(const std::filesystem::path& path, const TensorFile& file) {
    write_safetensors(std::vector{path}, file);
}

}  // namespace gyre::model
