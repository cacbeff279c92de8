#include "data/dataset.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <map>

#include "base/error.hpp"
#include "data/dataset_files.hpp"
#include "data/formats.hpp"
#include "data/idx.hpp"
#include "data/resize.hpp"

namespace gyre::data {
namespace {

namespace fs = std::filesystem;

template <class Elem, class Visit>
void visit_elems(const IdxArray& array, Visit visit) {
    const std::int64_t elems = array.elems();
    for (std::int64_t i = 0; i < elems; ++i) {
        Elem elem{};
        std::memcpy(&elem, array.payload.data() + static_cast<std::size_t>(i) * sizeof(Elem),
                    sizeof(Elem));
        visit(i, static_cast<double>(elem));  // exact for every IDX type
    }
}

// Calls visit(index, value as double) for every element.
template <class Visit>
void visit_values(const IdxArray& array, Visit visit) {
    switch (array.type) {
        case IdxType::u8:
            return visit_elems<std::uint8_t>(array, visit);
        case IdxType::i8:
            return visit_elems<std::int8_t>(array, visit);
        case IdxType::i16:
            return visit_elems<std::int16_t>(array, visit);
        case IdxType::i32:
            return visit_elems<std::int32_t>(array, visit);
        case IdxType::f32:
            return visit_elems<float>(array, visit);
        case IdxType::f64:
            return visit_elems<double>(array, visit);
    }
}

bool is_integer_in(double value, double low, double high) {
    return value >= low && value <= high && value == std::trunc(value);  // false for NaN
}

// Every message about one element starts with its file and offset.
std::string element_place(const std::string& path, const IdxArray& array, std::int64_t index) {
    return fmt::format(
        "{}: byte offset {} of the IDX data", path,
        array.header_bytes() + index * static_cast<std::int64_t>(array.elem_bytes()));
}

std::vector<std::uint8_t> convert_pixels(const std::string& path, const IdxArray& array) {
    std::vector<std::uint8_t> pixels(array.payload.size() / array.elem_bytes());
    if (array.type == IdxType::u8) {
        std::memcpy(pixels.data(), array.payload.data(), pixels.size());
        return pixels;
    }
    visit_values(array, [&](std::int64_t i, double value) {
        if (!is_integer_in(value, 0, 255)) {
            throw input_error(
                fmt::format("{}: pixel value: expected an integer in 0..255, found {}; rescale the "
                            "images",
                            element_place(path, array, i), value));
        }
        pixels[static_cast<std::size_t>(i)] = static_cast<std::uint8_t>(value);
    });
    return pixels;
}

std::vector<std::int32_t> convert_labels(const std::string& path, const IdxArray& array,
                                         const ClassLimit& limit) {
    // One below the largest int32, so that the number of classes fits too.
    constexpr double max_label = std::numeric_limits<std::int32_t>::max() - 1;
    std::vector<std::int32_t> labels(array.payload.size() / array.elem_bytes());
    visit_values(array, [&](std::int64_t i, double value) {
        if (!is_integer_in(value, 0, max_label)) {
            throw input_error(
                fmt::format("{}: label of image {}: expected an integer in 0..{:.0f}, found {}",
                            element_place(path, array, i), i, max_label, value));
        }
        if (value >= static_cast<double>(limit.classes)) {
            throw input_error(fmt::format(
                "{}: label of image {}: expected 0..{} because {}, found {}; if the label is "
                "right, give `classes` {} or more",
                element_place(path, array, i), i, limit.classes - 1, limit.reason, value,
                value + 1));
        }
        labels[static_cast<std::size_t>(i)] = static_cast<std::int32_t>(value);
    });
    return labels;
}

// `classes`: as given by the user; `train_images`: none if this is the training set.
ImageSet read_image_set(const fs::path& images_path, const fs::path& labels_path,
                        std::optional<int> classes, std::optional<std::int64_t> train_images) {
    constexpr std::int64_t max_size = std::numeric_limits<std::int32_t>::max();
    ImageSet set;
    set.images_path = images_path.string();
    set.labels_path = labels_path.string();

    const IdxArray labels = read_idx(labels_path);
    if (labels.dims.size() != 1) {
        throw input_error(
            fmt::format("{}: byte offset 3 of the IDX data: expected labels with 1 dimension [N], "
                        "found {} dimensions ({})",
                        set.labels_path, labels.dims.size(), format_dims(labels.dims)));
    }
    const IdxArray images = read_idx(images_path);
    if (images.dims.size() != 3 && images.dims.size() != 4) {
        throw input_error(
            fmt::format("{}: byte offset 3 of the IDX data: expected images with 3 dimensions "
                        "[N][H][W] or 4 dimensions [N][C][H][W], found {} ({})",
                        set.images_path, images.dims.size(), format_dims(images.dims)));
    }
    if (images.elems() == 0) {
        throw input_error(
            fmt::format("{}: byte offset 4 of the IDX data: expected at least one image with at "
                        "least one pixel, found sizes {}",
                        set.images_path, format_dims(images.dims)));
    }
    if (images.dims[0] != labels.dims[0]) {
        throw input_error(
            fmt::format("{} has {} images, but {} has {} labels; expected one label per image: are "
                        "they files of the same set?",
                        set.images_path, images.dims[0], set.labels_path, labels.dims[0]));
    }
    if (images.dims[0] > max_size || images.elems() / images.dims[0] > max_size) {
        throw input_error(
            fmt::format("{}: byte offset 4 of the IDX data: expected at most {} images of at most "
                        "{} pixels, found {}",
                        set.images_path, max_size, max_size, format_dims(images.dims)));
    }
    const std::size_t last = images.dims.size() - 1;
    set.count = images.dims[0];
    set.channels = images.dims.size() == 4 ? static_cast<int>(images.dims[1]) : 1;
    set.height = static_cast<int>(images.dims[last - 1]);
    set.width = static_cast<int>(images.dims[last]);
    set.labels = convert_labels(set.labels_path, labels,
                                class_limit(classes, train_images.value_or(set.count)));
    set.pixels = convert_pixels(set.images_path, images);
    return set;
}

Dataset load_files(const DatasetFiles& files, const DataSpec& spec, const TellOfData& tell) {
    Dataset set;
    switch (files.format) {
        case Format::idx:
            set.train = read_image_set(files.train_images, files.train_labels, spec.classes, {});
            set.test =
                read_image_set(files.test_images, files.test_labels, spec.classes, set.train.count);
            break;
        case Format::cifar10:
        case Format::cifar100:
            return load_cifar(files);
        case Format::npy:
            return load_npy(files, spec.classes);
        case Format::pictures:
            return load_pictures(files, spec, tell);
    }
    return set;
}

// Returns the number of classes: the user's, or that of the names or labels.
int count_classes(const Dataset& set, std::optional<int> given) {
    const auto largest = [](const ImageSet& images) {
        return *std::max_element(images.labels.begin(), images.labels.end());
    };
    const int seen = std::max(
        {largest(set.train) + 1, largest(set.test) + 1, static_cast<int>(set.class_names.size())});
    if (given.value_or(seen) < seen) {  // labels were already checked as they were read
        throw input_error(fmt::format(
            "{} has {} classes, but `classes` says {}; leave it out, or give {} or more",
            set.train.labels_path, seen, *given, seen));
    }
    if (given.value_or(seen) < 2) {
        throw input_error(
            fmt::format("{}: expected labels of at least 2 classes, found only label 0, as in {}; "
                        "if the set has more classes, give their number with `classes`",
                        set.train.labels_path, set.test.labels_path));
    }
    return given.value_or(seen);
}

// Takes every (1 / part)-th image of each class out of the training images: always the same ones.
ImageSet hold_out(ImageSet& train, double part) {
    const auto image_bytes = static_cast<std::ptrdiff_t>(train.pixels.size()) / train.count;
    ImageSet held;
    held.channels = train.channels;
    held.height = train.height;
    held.width = train.width;
    held.images_path = train.images_path;
    held.labels_path = train.labels_path;
    std::vector<std::uint8_t> pixels;
    std::map<std::int32_t, std::int64_t> seen;  // images, by class
    std::uint8_t* kept = train.pixels.writable();
    std::size_t kept_labels = 0;
    const std::uint8_t* image = kept;
    for (std::size_t i = 0; i < train.labels.size(); ++i, image += image_bytes) {
        const std::int32_t label = train.labels[i];
        const auto number = static_cast<double>(++seen[label]);
        if (std::floor(number * part) > std::floor((number - 1.0) * part)) {
            pixels.insert(pixels.end(), image, image + image_bytes);
            held.labels.push_back(label);
        } else {
            std::memmove(kept, image, static_cast<std::size_t>(image_bytes));
            kept += image_bytes;
            train.labels[kept_labels++] = label;
        }
    }
    if (held.labels.empty()) {
        throw input_error(fmt::format("`val-split` {}: no class of {} has as many as {:.0f} images",
                                      part, train.images_path, std::ceil(1.0 / part)));
    }
    held.count = std::ssize(held.labels);
    held.pixels = std::move(pixels);
    train.count -= held.count;
    train.labels.resize(kept_labels);
    train.pixels.resize(static_cast<std::size_t>(train.count * image_bytes));
    return held;
}

// Appends copies of the images of smaller classes, each class's in turn.
void balance(ImageSet& train) {
    std::map<std::int32_t, std::vector<std::size_t>> images;  // by class
    std::size_t largest = 0;
    for (std::size_t i = 0; i < train.labels.size(); ++i) {
        auto& of_class = images[train.labels[i]];
        of_class.push_back(i);
        largest = std::max(largest, of_class.size());
    }
    const std::size_t count = largest * images.size();
    if (count == train.labels.size()) {
        return;
    }
    if (count > std::numeric_limits<std::int32_t>::max()) {
        throw input_error(fmt::format(
            "`balanced-sampler`: {} classes of {} images, as many as the largest has in {}, are "
            "more than 2^31 - 1 images; use `class-weights` auto, which repeats none",
            images.size(), largest, train.images_path));
    }
    const std::size_t image_bytes = train.pixels.size() / train.labels.size();
    train.pixels.resize(count * image_bytes);
    std::uint8_t* const pixels = train.pixels.writable();
    std::uint8_t* copy = pixels + train.labels.size() * image_bytes;
    train.labels.reserve(count);
    for (const auto& [label, of_class] : images) {
        for (std::size_t i = of_class.size(); i < largest; ++i, copy += image_bytes) {
            std::memcpy(copy, pixels + of_class[i % of_class.size()] * image_bytes, image_bytes);
            train.labels.push_back(label);
        }
    }
    train.count = std::ssize(train.labels);
}

}  // namespace

ClassLimit class_limit(std::optional<int> classes, std::int64_t train_images) {
    constexpr std::int64_t most_classes = 65536;
    if (classes) {
        return {*classes, fmt::format("there are {} classes", *classes)};
    }
    if (train_images < most_classes) {
        return {train_images, fmt::format("there are {} training images", train_images)};
    }
    return {most_classes, fmt::format("labels alone imply at most {} classes", most_classes)};
}

std::string describe_shape(const ImageSet& set) {
    return fmt::format("{}x{}x{} (channels x height x width)", set.channels, set.height, set.width);
}

Dataset load_dataset(const DataSpec& spec, const TellOfData& tell) {
    if (spec.limit && *spec.limit < 1) {
        throw usage_error(
            fmt::format("limit of training images: expected 1 or more, found {}", *spec.limit));
    }
    if (spec.classes && *spec.classes < 2) {
        throw usage_error(fmt::format("`classes`: expected 2 or more, found {}", *spec.classes));
    }
    const DatasetFiles files = locate_dataset(spec.path);

    Dataset set = load_files(files, spec, tell);
    set.name = files.name;
    set.directory = files.directory.string();
    ImageSet& train = set.train;
    set.classes = count_classes(set, spec.classes);
    if (!set.class_names.empty()) {
        set.class_names.resize(static_cast<std::size_t>(set.classes));
    }
    if (spec.resize) {
        resize_images(train, *spec.resize);
        resize_images(set.test, *spec.resize);
    }
    const ImageSet& test = set.test;
    if (train.channels != test.channels || train.height != test.height ||
        train.width != test.width) {
        throw input_error(fmt::format(
            "training and test images differ in shape: {} has {}, {} has {}", train.images_path,
            describe_shape(train), test.images_path, describe_shape(test)));
    }

    if (spec.limit && *spec.limit < train.count) {
        const auto image_elems = train.pixels.size() / static_cast<std::size_t>(train.count);
        train.count = *spec.limit;
        train.labels.resize(static_cast<std::size_t>(train.count));
        train.labels.shrink_to_fit();
        train.pixels.resize(static_cast<std::size_t>(train.count) * image_elems);
    }
    if (spec.val_split && set.validation.count > 0) {
        throw usage_error(
            fmt::format("`val-split` {}: {} has validation images already; leave it out, or the "
                        "folder",
                        *spec.val_split, set.validation.images_path));
    }
    if (spec.val_split) {
        set.validation = hold_out(train, *spec.val_split);
    }
    if (spec.balanced) {
        balance(train);
    }
    return set;
}

Normalisation measure_normalisation(const ImageSet& set) {
    const auto channels = static_cast<std::size_t>(set.channels);
    const std::size_t plane_elems =
        static_cast<std::size_t>(set.height) * static_cast<std::size_t>(set.width);
    std::vector<std::array<std::int64_t, 256>> histograms(channels);
    const std::uint8_t* pixel = set.pixels.data();
    for (std::int64_t image = 0; image < set.count; ++image) {
        for (auto& histogram : histograms) {
            for (const std::uint8_t* end = pixel + plane_elems; pixel != end; ++pixel) {
                ++histogram[*pixel];
            }
        }
    }

    Normalisation result;
    const double elems = static_cast<double>(set.count) * static_cast<double>(plane_elems);
    for (const auto& histogram : histograms) {
        double sum = 0;  // exact, as it is an integer far below 2^53
        for (std::size_t value = 0; value < histogram.size(); ++value) {
            sum += static_cast<double>(histogram[value]) * static_cast<double>(value);
        }
        const double mean = sum / elems;
        double squares = 0;
        for (std::size_t value = 0; value < histogram.size(); ++value) {
            const double distance = static_cast<double>(value) - mean;
            squares += static_cast<double>(histogram[value]) * distance * distance;
        }
        // A constant channel would divide 0 by 0; with 1 it becomes all zeros, which is right, as
        // it carries no information.
        const bool constant = std::count(histogram.begin(), histogram.end(), 0) >=
                              static_cast<std::ptrdiff_t>(histogram.size()) - 1;
        result.mean.push_back(static_cast<float>(mean / 255));
        result.stddev.push_back(constant ? 1.0F
                                         : static_cast<float>(std::sqrt(squares / elems) / 255));
    }
    return result;
}

}  // namespace gyre::data
