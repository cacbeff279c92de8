// Hashes for telling apart what ranks have, not against an adversary.
#pragma once

#include <cstdint>
#include <map>
#include <set>
#include <span>
#include <string>

#include "data/dataset.hpp"
#include "model/safetensors.hpp"
#include "train/rooms.hpp"

namespace gyre::train {

// Hash of everything in the set that training depends on.
std::string hash_dataset(const Dataset& dataset);
std::string hash_text(const std::string& text);
// Hash of names, values and metadata in any order, except for metadata by these names.
std::string hash_tensors(const TensorFile& file, const std::set<std::string>& without = {});
// The same of tensors that are not in a file, without metadata.
class TensorsHash {
 public:
    void add(const std::string& name, std::span<const float> values);
    std::string text(const std::string& metadata = {}) const;

 private:
    std::map<std::string, std::uint64_t> hashes_;
};
std::uint64_t hash_bytes(const void* data, std::size_t bytes);

}  // namespace gyre::train
