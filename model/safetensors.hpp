// Weights on disk in the safetensors format (https://github.com/huggingface/safetensors), readable
// by its Python package: 8 bytes little-endian header length, a JSON header, the raw tensors.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

namespace gyre::model {

struct HostTensor {
    std::string name;
    std::vector<std::int64_t> shape;
    std::vector<float> values;  // row-major
    std::string dtype = "F32";  // in the file; `values` are converted
};

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
