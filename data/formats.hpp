// The formats of data sets beside IDX: which a folder holds, and reading it.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>

#include "data/dataset.hpp"
#include "data/dataset_files.hpp"

namespace gyre::data {

// The set of another format than IDX in a directory, or in the folder in it that CIFAR's archives
// unpack to; nothing where there is none. Files may be missing: loading says so.
std::optional<DatasetFiles> find_other_set(const std::filesystem::path& directory);

// These fill in all of a Dataset but its name, directory, and number of classes where `classes`
// stays 0: then it is that of labels. Errors are load_dataset()'s.
Dataset load_cifar(const DatasetFiles& files);
Dataset load_npy(const DatasetFiles& files, std::optional<int> classes);
Dataset load_pictures(const DatasetFiles& files, const DatasetOptions& options);

// What labels must stay below.
struct ClassLimit {
    std::int64_t classes = 0;
    std::string reason;
};
// The user's number of classes, or as many as labels alone are believed: one damaged label must
// not make a last layer of gigabytes.
ClassLimit class_limit(std::optional<int> classes, std::int64_t train_images);

// "3x4x5 (channels x height x width)"
std::string describe_shape(const ImageSet& set);

}  // namespace gyre::data
