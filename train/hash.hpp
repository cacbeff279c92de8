// Hashes for telling apart what ranks have, not against an adversary.
#pragma once

#include <cstdint>
#include <map>
#include <set>
#include <span>
#include <string>

#include "comm/communicator.hpp"
#include "data/dataset.hpp"
#include "model/safetensors.hpp"
#include "train/rooms.hpp"

namespace gyre::train {

// Hash of everything in the set that training depends on.
std::string hash_dataset(const Dataset& dataset);
std::string hash_text(const std::string& text);
// Hash of names, values and metadata in any order, except for metadata by these names.
std::string hash_tensors(const TensorFile& file, const std::set<std::string>& without = {});
std::uint64_t hash_bytes(const void* data, std::size_t bytes);

// A hash of tensors of which ranks have slices. Each is a sum over blocks of 16 elements, so that
// it depends neither on the slices nor on the ranks.
class SlicesHash {
 public:
    // A slice from this element on, a multiple of 16, of the tensor, which all ranks must name.
    void add(const std::string& name, std::int64_t first_elem, std::span<const float> values);
    // Collective: a hash of the names, and the sums of what all ranks have added.
    std::string text(Communicator& comm) const;

 private:
    std::map<std::string, std::uint64_t> sums_;
};

}  // namespace gyre::train
