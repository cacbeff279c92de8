// The user's settings for the data set.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace gyre::data {

// How an image is brought to height x width pixels.
struct Resize {
    int height = 0, width = 0;
    // Above 0: the shorter side is resized to this many pixels, the longer one in proportion, and
    // the middle is cut out (torchvision's Resize and CenterCrop). 0: all of the image is resized,
    // whatever its aspect ratio.
    int shorter = 0;
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
    // All images are brought to this size; without it, they must all have the same size.
    std::optional<Resize> resize = {};
    // Up to so many pictures of a folder that cannot be read are left out, and named.
    std::int64_t skip_bad = 0;
    std::vector<float> mean = {}, stddev = {};  // per channel, or one for all; empty: measured
    // This part of each class's training images, after `limit`, is held out for validation.
    std::optional<double> val_split = {};
    // Images of smaller classes are repeated, in turn, until each class of the training images that
    // are left has as many as the largest.
    bool balanced = false;
};

}  // namespace gyre::data
