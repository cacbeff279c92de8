#include "train/hash.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <vector>

#include "base/data_type.hpp"
#include "data/hash.hpp"

namespace gyre::train {
namespace {

// The finalizer of SplitMix64, a bijection.
constexpr std::uint64_t mixed(std::uint64_t x) {
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    return x ^ x >> 31;
}
constexpr std::size_t kBlockElems = 16;
constexpr auto kBlockKeys = [] {
    std::array<std::uint32_t, kBlockElems> keys{};
    for (std::size_t i = 0; i < keys.size(); ++i) {
        keys[i] = static_cast<std::uint32_t>(mixed(i + 1)) | 1;
    }
    return keys;
}();

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
    std::string text;
    for (const auto& [key, value] : file.metadata) {
        if (without.count(key) == 0) {
            text += fmt::format("{}={} ", key, value);
        }
    }
    std::map<std::string, std::uint64_t> hashes;
    for (const HostTensor& tensor : file.tensors) {
        hashes[tensor.name] =
            hash_bytes(tensor.values.data(), tensor.values.size() * sizeof(float));
    }
    for (const auto& [name, hash] : hashes) {
        text += fmt::format("{} {:x} ", name, hash);
    }
    return hash_text(text);
}

std::uint64_t hash_bytes(const void* data, std::size_t bytes) {
    Hash hash;
    hash.add(data, bytes);
    return hash.value();
}

void SlicesHash::add(const std::string& name, std::int64_t first_elem,
                     std::span<const float> values) {
    std::uint64_t& sum = sums_[name];
    const auto block = [&](const float* x, std::uint64_t number) {
        std::uint64_t products = 0;
        for (std::size_t i = 0; i < kBlockElems; ++i) {
            products += std::uint64_t{narrow::bits_of(x[i])} * kBlockKeys[i];
        }
        sum += mixed(products ^ mixed(number + 1));
    };
    auto number = static_cast<std::uint64_t>(first_elem) / kBlockElems;
    std::size_t at = 0;
    for (; at + kBlockElems <= values.size(); at += kBlockElems) {
        block(values.data() + at, number++);
    }
    if (at < values.size()) {
        std::array<float, kBlockElems> rest{};
        std::copy(values.begin() + static_cast<std::ptrdiff_t>(at), values.end(), rest.begin());
        block(rest.data(), number);
    }
}

std::string SlicesHash::text(Communicator& comm) const {
    std::vector<double> parts;  // of 16 bits, whose sums are exact
    for (const auto& [name, sum] : sums_) {
        for (int shift = 0; shift < 64; shift += 16) {
            parts.push_back(static_cast<double>(sum >> shift & 0xffff));
        }
    }
    comm.allreduce_sum(parts);
    std::string text;
    auto part = parts.begin();
    for (const auto& [name, own] : sums_) {
        std::uint64_t sum = 0;
        for (int shift = 0; shift < 64; shift += 16) {
            sum += static_cast<std::uint64_t>(*part++) << shift;
        }
        text += fmt::format("{} {:x} ", name, sum);
    }
    return hash_text(text);
}

std::string hash_text(const std::string& text) {
    Hash hash;
    hash.add(text.data(), text.size());
    return text_of(hash);
}

}  // namespace gyre::train
