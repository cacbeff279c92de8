// Loads image classification data sets from files of several formats and measures them.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "data/data_spec.hpp"
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
    ImageSet test;        // same channels, height and width as train
    ImageSet validation;  // of the same shape; empty if there is none
    int classes = 0;
    std::vector<std::string> class_names;  // [classes]; empty if the format has none
};

// Receives lines for the user: progress of long work, and a cache that cannot be written.
using TellOfData = std::function<void(const std::string&)>;

// Loads a set in the first of these formats for which the folder holds files:
//
// IDX: the four files of a set, training and test images and labels, in the directory D or in
// D/raw (torchvision's layout). File names, with S one of `train` (training set), `t10k` or `test`
// (test set), are [NAME-]S-images-idx3-ubyte and [NAME-]S-labels-idx1-ubyte; `.idx` for `-idx`,
// idx4 for idx3 and an appended `.gz` or `.xz` are also accepted; the plain file is preferred, then
// `.gz`. Images are [N][H][W] (one channel) or [N][C][H][W] (PyTorch's order; [N][H][W][C] cannot
// be told from it and is not supported), labels are [N]; any IDX type will do as long as every
// value is an integer in range.
// CIFAR: the binary version of CIFAR-10 or CIFAR-100 (fine labels), in D or in the folder in D
// that its archive unpacks to.
// NumPy: train_images.npy, train_labels.npy, test_images.npy and test_labels.npy, or x_train.npy,
// y_train.npy, x_test.npy and y_test.npy: images [N][H][W] or [N][H][W][C] of uint8, labels [N] or
// [N][1] of any integers. Images [N][H][W] are mapped, not read.
// Pictures: PNG, JPEG and WebP files in train/CLASS/… and test/CLASS/… (or val/CLASS/…; if there
// are both, val is for validation), or in tar files of either part, with such folders or with
// WebDataset's labels, whose classes have no names (data/listing.hpp). If any of them is in colour,
// all get 3 channels. Classes are numbered in the order of their names. Pictures are decoded once,
// into a file in cache_folder() (data/image_cache.hpp) that is then mapped.
//
// Throws usage_error for a bad option and input_error if anything is wrong with the set: it is not
// found, empty or malformed, files are missing or ambiguous, values or labels are out of range,
// counts, shapes or classes disagree, there are fewer than 2 classes or more than 2^31-1 images, or
// too few of them to hold some out for validation, for which mapped images are read into memory.
Dataset load_dataset(const DataSpec& spec, const TellOfData& tell = {});

// Statistics per channel of pixels scaled to [0, 1]: x is normalised as (x / 255 - mean) / stddev.
struct Normalisation {
    std::vector<float> mean;
    std::vector<float> stddev;  // of the population (divided by n); 1 for a constant channel
};

// Mean and standard deviation over all images of a set, independent of threads and ranks.
Normalisation measure_normalisation(const ImageSet& set);

}  // namespace gyre::data
