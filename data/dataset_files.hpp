// Finds data sets: the search path, and the files of a set in a directory.
#pragma once

#include <filesystem>
#include <string>
#include <system_error>
#include <vector>

namespace gyre::data {

enum class Format { idx, cifar10, cifar100, npy, pictures };

struct DatasetFiles {
    Format format = Format::idx;
    std::string name;                 // the folder's; for NAME/raw it is NAME
    std::filesystem::path directory;  // where the files are
    // only for IDX and NumPy
    std::filesystem::path train_images, train_labels, test_images, test_labels;
};

// Returns the files of DataSpec::path, by the names that load_dataset() describes, without
// opening them. Throws usage_error if `data` is empty, input_error if it is not found or if files
// are missing or ambiguous.
DatasetFiles locate_dataset(const std::string& data);

// Returns the folders in which names are looked up, where the first match wins: the entries of
// $GYRE_DATA (separated by colons; each a folder of sets or a set's own folder), data-cache,
// $HOME/.cache/gyre, /usr/local/share/datasets, /usr/share/datasets. They need not exist.
std::vector<std::filesystem::path> dataset_search_path();

// The entries of a directory sorted by name; those that can be read, and why there are not more.
std::vector<std::filesystem::path> list_directory(const std::filesystem::path& directory,
                                                  std::error_code& error);
inline std::vector<std::filesystem::path> list_directory(const std::filesystem::path& directory) {
    std::error_code ignored;
    return list_directory(directory, ignored);
}

struct FoundDataset {
    std::string name;
    std::filesystem::path directory;
};

// Returns the sets on the search path whose files exist, in search order. The files are not opened;
// in formats other than IDX some may be missing. Folders that cannot be read are skipped.
std::vector<FoundDataset> find_datasets();

}  // namespace gyre::data
