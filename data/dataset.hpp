// Image classification data sets in files of several formats: loading and measuring them.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "data/pixels.hpp"

namespace gyre::data {

// `count` images with values 0..255 and their labels in [0, Dataset::classes).
struct ImageSet {
    std::int64_t count = 0;
    int channels = 0;
    int height = 0;
    int width = 0;
    Pixels pixels;                     // [count][channels][height][width]
    std::vector<std::int32_t> labels;  // [count]
    std::string images_path;
    std::string labels_path;
};

struct Dataset {
    std::string name;       // the folder's name; for NAME/raw it is NAME
    std::string directory;  // where the files are
    ImageSet train;
    ImageSet test;  // same channels, height and width as train
    int classes = 0;
    std::vector<std::string> class_names;  // [classes]; empty where the format has none
};

struct ImageSize {
    int height = 0, width = 0;
};

struct DatasetOptions {
    // A directory when it contains '/', is "." or "..", or is an existing directory that holds a
    // set; otherwise a name to look up, in any case, on dataset_search_path() of
    // data/dataset_files.hpp.
    std::string data;
    std::optional<std::int64_t> limit;  // keep the first so many training images
    // Default: the largest label of both sets (before `limit`) + 1; that must not exceed 65,536,
    // nor the number of training images.
    std::optional<int> classes;
    // The size that all images are brought to; otherwise they must agree in it.
    std::optional<ImageSize> resize = {};
    // Is told what the user should know: what takes long, and a cache that cannot be written.
    std::function<void(const std::string&)> tell = {};
};

// Loads a set in the first of these formats of which the folder holds files:
//
// IDX: the four files of a set, training and test images and labels. A directory D stands for D or
// D/raw (torchvision's layout). File names, with S one of `train` (training set), `t10k` or `test`
// (test set), are [NAME-]S-images-idx3-ubyte and [NAME-]S-labels-idx1-ubyte, with `.idx` for
// `-idx`, idx4 for idx3 and an appended `.gz` or `.xz` also accepted; of one name the plain file
// wins, then `.gz`. Images are [N][H][W] (one channel) or [N][C][H][W] (PyTorch's order;
// [N][H][W][C] cannot be told from it and is not supported), labels [N]; of any IDX type as long as
// every value is an integer in range.
// CIFAR: the binary version of CIFAR-10 or CIFAR-100 (its fine labels), in D or in the folder in D
// that its archive unpacks to.
// NumPy: train_images.npy, train_labels.npy, test_images.npy and test_labels.npy, or x_train.npy,
// y_train.npy, x_test.npy and y_test.npy: images [N][H][W] or [N][H][W][C] of uint8, labels [N] or
// [N][1] of any integers. Images [N][H][W] are mapped, not read.
// Pictures: train/CLASS/… and test/CLASS/… (or val/CLASS/…), PNG and JPEG files, of which one with
// colours makes all have 3 channels. Classes are numbered in the order of their names. Pictures
// are decoded once, to a file in cache_folder() (data/image_cache.hpp) that is mapped.
//
// Throws usage_error for a bad option and input_error for everything wrong with the set: not found,
// files missing or ambiguous, malformed, values or labels out of range, counts, shapes or classes
// that disagree, empty, fewer than 2 classes, more than 2^31-1 images.
Dataset load_dataset(const DatasetOptions& options);

// Per channel, of pixels scaled to [0, 1]: x is normalised as (x / 255 - mean) / stddev.
struct Normalisation {
    std::vector<float> mean;
    std::vector<float> stddev;  // of the population (divided by n); 1 for a constant channel
};

// Mean and standard deviation over all images of a set, independent of threads and ranks.
Normalisation measure_normalisation(const ImageSet& set);

}  // namespace gyre::data
