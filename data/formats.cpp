#include "data/formats.hpp"

#include <fmt/format.h>

#include <system_error>

#include "base/error.hpp"
#include "data/listing.hpp"

namespace gyre::data {
namespace {

namespace fs = std::filesystem;

bool is_file(const fs::path& path) {
    std::error_code error;
    return fs::is_regular_file(path, error);
}

std::optional<Format> cifar_in(const fs::path& directory) {
    if (is_file(directory / "data_batch_1.bin") || is_file(directory / "test_batch.bin")) {
        return Format::cifar10;
    }
    const bool train = is_file(directory / "train.bin"), test = is_file(directory / "test.bin");
    if ((train && test) || ((train || test) && is_file(directory / "fine_label_names.txt"))) {
        return Format::cifar100;
    }
    return std::nullopt;
}

// Finds a set of .npy files in whichever of the two spellings has a file.
std::optional<DatasetFiles> npy_in(const fs::path& directory) {
    constexpr const char* spellings[][4] = {
        {"train_images.npy", "train_labels.npy", "test_images.npy", "test_labels.npy"},
        {"x_train.npy", "y_train.npy", "x_test.npy", "y_test.npy"}};
    for (const auto& names : spellings) {
        for (const char* name : names) {
            if (is_file(directory / name)) {
                DatasetFiles files;
                files.format = Format::npy;
                files.directory = directory;
                files.train_images = directory / names[0];
                files.train_labels = directory / names[1];
                files.test_images = directory / names[2];
                files.test_labels = directory / names[3];
                return files;
            }
        }
    }
    return std::nullopt;
}

}  // namespace

std::optional<DatasetFiles> find_other_set(const fs::path& directory) {
    const auto as = [](Format format, const fs::path& place) {
        DatasetFiles files;
        files.format = format;
        files.directory = place;
        return files;
    };
    for (const char* unpacked : {"", "cifar-10-batches-bin", "cifar-100-binary"}) {
        const fs::path place = *unpacked == '\0' ? directory : directory / unpacked;
        if (const auto format = cifar_in(place)) {
            return as(*format, place);
        }
    }
    if (auto files = npy_in(directory)) {
        return files;
    }
    if (has_pictures(directory)) {
        return as(Format::pictures, directory);
    }
    return std::nullopt;
}

}  // namespace gyre::data
