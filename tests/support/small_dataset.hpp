// A small data set that a test writes, corrupts and loads again.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "data/dataset.hpp"
#include "data/idx.hpp"

namespace gyre::test {

using data::Dataset;
using data::IdxArray;
using data::IdxType;

// Writes `array` as a plain IDX file, replacing any file there; its payload must fit its dims.
inline void write_idx(const std::filesystem::path& path, const IdxArray& array) {
    std::string bytes{'\0', '\0', static_cast<char>(array.type),
                      static_cast<char>(array.dims.size())};
    for (const std::int64_t dim : array.dims) {
        for (const int shift : {24, 16, 8, 0}) {
            bytes += static_cast<char>((dim >> shift) & 0xFF);
        }
    }
    const std::size_t header_bytes = bytes.size(), elem_bytes = array.elem_bytes();
    bytes.append(reinterpret_cast<const char*>(array.payload.data()), array.payload.size());
    if constexpr (std::endian::native == std::endian::little) {  // a file is big-endian
        for (auto elem = bytes.begin() + static_cast<std::ptrdiff_t>(header_bytes);
             elem != bytes.end(); elem += static_cast<std::ptrdiff_t>(elem_bytes)) {
            std::reverse(elem, elem + static_cast<std::ptrdiff_t>(elem_bytes));
        }
    }
    std::ofstream file(path, std::ios::binary);
    if (!file.write(bytes.data(), static_cast<std::streamsize>(bytes.size())).flush()) {
        throw std::runtime_error("cannot write " + path.string());
    }
}

template <class T>
IdxArray array_of(IdxType type, std::vector<std::int64_t> dims, const std::vector<T>& values) {
    IdxArray array;
    array.type = type;
    array.dims = std::move(dims);
    array.payload.resize(values.size() * sizeof(T));
    if (!values.empty()) {
        std::memcpy(array.payload.data(), values.data(), array.payload.size());
    }
    return array;
}

inline IdxArray labels_of(const std::vector<std::uint8_t>& labels) {
    return array_of(IdxType::u8, {static_cast<std::int64_t>(labels.size())}, labels);
}

// Pixel i of the whole array has the value (i + first) modulo 256.
inline IdxArray images_of(std::vector<std::int64_t> dims, int first = 0) {
    std::int64_t elems = 1;
    for (const std::int64_t dim : dims) {
        elems *= dim;
    }
    std::vector<std::uint8_t> values(static_cast<std::size_t>(elems));
    for (std::size_t i = 0; i < values.size(); ++i) {
        values[i] = static_cast<std::uint8_t>(i + static_cast<std::size_t>(first));
    }
    return array_of(IdxType::u8, std::move(dims), values);
}

// The four files of a data set: 6 training and 3 test images of 4x5 pixels, 3 classes.
struct SetArrays {
    IdxArray train_images = images_of({6, 4, 5});
    IdxArray train_labels = labels_of({0, 1, 2, 2, 1, 0});
    IdxArray test_images = images_of({3, 4, 5}, 100);
    IdxArray test_labels = labels_of({2, 0, 1});
};

inline constexpr const char* train_images_file = "train-images-idx3-ubyte";
inline constexpr const char* train_labels_file = "train-labels-idx1-ubyte";
inline constexpr const char* test_images_file = "t10k-images-idx3-ubyte";
inline constexpr const char* test_labels_file = "t10k-labels-idx1-ubyte";

inline void write_set(const std::filesystem::path& dir, const SetArrays& set = {}) {
    std::filesystem::create_directories(dir);
    write_idx(dir / train_images_file, set.train_images);
    write_idx(dir / train_labels_file, set.train_labels);
    write_idx(dir / test_images_file, set.test_images);
    write_idx(dir / test_labels_file, set.test_labels);
}

inline Dataset load(const std::filesystem::path& dir) {
    return data::load_dataset({dir.string(), {}, {}});
}

inline void write_text(const std::filesystem::path& path, const std::string& text) {
    std::ofstream(path) << text;
}

}  // namespace gyre::test
