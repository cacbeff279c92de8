// The user's settings for the data set.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace gyre::data {

struct ImageSize {
    int height = 0, width = 0;
};

struct DataSpec {
    // A directory if it contains '/', is "." or "..", or is an existing directory that holds a
    // set; otherwise a name, looked up without regard to case on dataset_search_path() of
    // data/dataset_files.hpp.
    std::string path = "fashion-mnist";
    std::optional<std::int64_t> limit = {};  // keep only the first `limit` training images
    // Default: the largest label of both sets (before `limit`) + 1, which must exceed neither
    // 65,536 nor the number of training images.
    std::optional<int> classes = {};
    // All images are resized to this; without it, they must all have the same size.
    std::optional<ImageSize> resize = {};
    // Up to so many pictures of a folder that cannot be read are left out, and named.
    std::int64_t skip_bad = 0;
    std::vector<float> mean = {}, stddev = {};  // per channel, or one for all; empty: measured
    // This part of each class's training images, after `limit`, is held out for validation.
    std::optional<double> val_split = {};
};

}  // namespace gyre::data
