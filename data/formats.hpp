// The data set formats besides IDX: detecting which one a folder holds, and reading it.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>

#include "data/dataset.hpp"
#include "data/dataset_files.hpp"

namespace gyre::data {

// Finds a set of a format other than IDX in a directory, or in the subfolder that CIFAR's archives
// unpack to; returns nothing if there is none. Files may be missing: loading reports that.
std::optional<DatasetFiles> find_other_set(const std::filesystem::path& directory);

// These fill in all of a Dataset except its name, directory and, if `classes` stays 0, number of
// classes, which then follows from the labels. They throw what load_dataset() throws.
Dataset load_cifar(const DatasetFiles& files);
Dataset load_npy(const DatasetFiles& files, std::optional<int> classes);
Dataset load_pictures(const DatasetFiles& files, const DataSpec& spec, const TellOfData& tell);

// Labels must be less than `classes`, for the given reason.
struct ClassLimit {
    std::int64_t classes = 0;
    std::string reason;
};
// Returns the user's number of classes, or the most that labels alone may imply: one damaged label
// must not lead to a last layer of gigabytes.
ClassLimit class_limit(std::optional<int> classes, std::int64_t train_images);

// "3x4x5 (channels x height x width)"
std::string describe_shape(const ImageSet& set);

}  // namespace gyre::data
