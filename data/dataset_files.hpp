// Where data sets are: the search path, and the files of a set in a directory.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

namespace gyre::data {

enum class Format { idx, cifar10, cifar100, npy, pictures };

struct DatasetFiles {
    Format format = Format::idx;
    std::string name;                 // the folder's; for NAME/raw it is NAME
    std::filesystem::path directory;  // where the files are
    // of IDX and NumPy
    std::filesystem::path train_images, train_labels, test_images, test_labels;
};

// The files of DatasetOptions::data, by the names that load_dataset() describes. They are not
// opened. Throws usage_error where `data` is empty, input_error where it is not found or where
// files are missing or ambiguous.
DatasetFiles locate_dataset(const std::string& data);

// Folders in which names are looked up, first match wins: the entries of $GYRE_DATA (separated by
// colons; each a folder of sets or a set's own folder), data-cache, $HOME/.cache/gyre,
// /usr/local/share/datasets, /usr/share/datasets. They need not exist.
std::vector<std::filesystem::path> dataset_search_path();

struct FoundDataset {
    std::string name;
    std::filesystem::path directory;
};

// The sets on the search path whose files exist (they are not opened; of formats other than IDX
// some may be missing), in search order; never throws for folders that cannot be read.
std::vector<FoundDataset> find_datasets();

}  // namespace gyre::data
