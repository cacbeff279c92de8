#include "train/hash.hpp"

#include <fmt/format.h>

#include <cstring>
#include <map>

namespace gyre::train {
namespace {

// Multiply and shift, eight bytes at a time.
class Hash {
 public:
    void add(const void* data, std::size_t bytes) {
        const auto* at = static_cast<const unsigned char*>(data);
        mix(bytes);
        for (; bytes >= 8; at += 8, bytes -= 8) {
            std::uint64_t word;
            std::memcpy(&word, at, 8);
            mix(word);
        }
        std::uint64_t rest = 0;
        std::memcpy(&rest, at, bytes);
        mix(rest);
    }
    std::string text() const { return fmt::format("{:016x}", state_); }
    std::uint64_t value() const { return state_; }

 private:
    void mix(std::uint64_t word) {
        state_ = (state_ ^ word) * 0x9E3779B97F4A7C15u;
        state_ ^= state_ >> 29;
    }
    std::uint64_t state_ = 0x6779726500000000u;
};

}  // namespace

std::string hash_dataset(const Dataset& dataset) {
    Hash hash;
    for (const ImageSet* set : {&dataset.train, &dataset.test}) {
        const std::int64_t extents[] = {set->count, set->channels, set->height, set->width};
        hash.add(extents, sizeof extents);
        hash.add(set->pixels.data(), set->pixels.size());
        hash.add(set->labels.data(), set->labels.size() * sizeof(std::int32_t));
    }
    return hash.text();
}

std::string hash_tensors(const TensorFile& file, const std::set<std::string>& without) {
    std::map<std::string, std::uint64_t> tensors;
    for (const HostTensor& tensor : file.tensors) {
        tensors[tensor.name] =
            hash_bytes(tensor.values.data(), tensor.values.size() * sizeof(float));
    }
    std::string text;
    for (const auto& [key, value] : file.metadata) {
        if (without.count(key) == 0) {
            text += fmt::format("{}={} ", key, value);
        }
    }
    for (const auto& [name, hash] : tensors) {
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
    return hash.text();
}

}  // namespace gyre::train
