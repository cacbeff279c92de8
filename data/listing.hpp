// Which pictures a data set has, in folders of classes or in tar files.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "data/picture.hpp"

namespace gyre::data {

// Where the pictures of one part of a set are.
struct PicturePlace {
    std::string part;                           // "train", "test" or "val"
    std::filesystem::path folder;               // of the classes' folders,
    std::vector<std::filesystem::path> shards;  // or tar files, sorted, if there are any

    const std::filesystem::path& path() const { return shards.empty() ? folder : shards.front(); }
};

// Finds a part of the set in a directory: the classes' folders in the folder PART, or the tar files
// in it, or else the tar files beside it whose first word that names a part is PART (or
// `validation` for val); words are between hyphens, underscores or dots. Nothing if there are none
// of them, nor the folder.
std::optional<PicturePlace> find_pictures(const std::filesystem::path& directory,
                                          const std::string& part);

// True if there are folders or tar files of training pictures in the directory.
bool has_pictures(const std::filesystem::path& directory);

struct PictureListing {
    std::vector<std::string> classes;  // sorted; empty if the labels are numbers in the tar files
    std::vector<PictureFile> files;    // sorted in each class; if labels are numbers, as stored
    std::vector<std::int32_t> labels;  // [files]
};

// Lists the pictures of a part: those in CLASS/… of its folder; those in CLASS/… or PART/CLASS/… of
// its tar files; or, as WebDataset has them, those of its tar files beside each of which there is a
// label: KEY.cls holds the number of the class of KEY.jpg. train: nullptr if this is the training
// set. Throws input_error.
PictureListing list_pictures(const PicturePlace& place, const PictureListing* train,
                             std::optional<int> classes);

}  // namespace gyre::data
