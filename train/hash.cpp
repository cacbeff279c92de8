#include "train/hash.hpp"

#include <fmt/format.h>

#include "data/hash.hpp"

namespace gyre::train {
namespace {

std::string text_of(const Hash& hash) {
    return fmt::format("{:016x}", hash.value());
}

}  // namespace

std::string hash_dataset(const Dataset& dataset) {
    Hash hash;
    for (const ImageSet* set : {&dataset.train, &dataset.test, &dataset.validation}) {
        if (set->count == 0) {
            continue;
        }
        const std::int64_t extents[] = {set->count, set->channels, set->height, set->width};
        hash.add(extents, sizeof extents);
        hash.add(set->pixels.data(), set->pixels.size());
        hash.add(set->labels.data(), set->labels.size() * sizeof(std::int32_t));
    }
    return text_of(hash);
}

std::string hash_tensors(const TensorFile& file, const std::set<std::string>& without) {
    TensorsHash tensors;
    for (const HostTensor& tensor : file.tensors) {
        tensors.add(tensor.name, tensor.values);
    }
    std::string text;
    for (const auto& [key, value] : file.metadata) {
        if (without.count(key) == 0) {
            text += fmt::format("{}={} ", key, value);
        }
    }
    return tensors.text(text);
}

void TensorsHash::add(const std::string& name, std::span<const float> values) {
    hashes_[name] = hash_bytes(values.data(), values.size_bytes());
}

std::string TensorsHash::text(const std::string& metadata) const {
    std::string text = metadata;
    for (const auto& [name, hash] : hashes_) {
        text += fmt::format("{} {:x} ", name, hash);
    }
    return hash_text(text);
}

std::uint64_t hash_bytes(const void* data, std::size_t bytes) {
    Hash hash;
    hash.add(data, bytes);
    return hash.value();
}

std::string hash_text(const std::string& text) {
    Hash hash;
    hash.add(text.data(), text.size());
    return text_of(hash);
}

}  // namespace gyre::train
