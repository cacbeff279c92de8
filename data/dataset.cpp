#include "data/dataset.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <set>
#include <string_view>
#include <system_error>
#include <utility>

#include "data/idx.hpp"
#include "kernels/base/error.hpp"

namespace gyre::data {
namespace {

namespace fs = std::filesystem;

// ---- The files of a set ----

enum Role : std::size_t { train_images, train_labels, test_images, test_labels, role_elems };

constexpr std::array<std::string_view, role_elems> role_names{"training images", "training labels",
                                                              "test images", "test labels"};
constexpr std::array<std::string_view, role_elems> role_patterns{
    "[NAME-]train-images-idx3-ubyte", "[NAME-]train-labels-idx1-ubyte",
    "[NAME-]t10k-images-idx3-ubyte or [NAME-]test-images-idx3-ubyte",
    "[NAME-]t10k-labels-idx1-ubyte or [NAME-]test-labels-idx1-ubyte"};

// A file whose name fits a role.
struct Candidate {
    Role role = role_elems;
    std::string prefix;   // "emnist-letters-" or ""
    std::string stem;     // the file's name without compression suffix
    int compression = 0;  // order of preference: 0 plain, 1 .gz, 2 .xz
    std::string file;
};

bool remove_suffix(std::string_view& text, std::string_view suffix) {
    if (!text.ends_with(suffix)) {
        return false;
    }
    text.remove_suffix(suffix.size());
    return true;
}

std::optional<Candidate> parse_file_name(const std::string& file) {
    Candidate candidate;
    candidate.file = file;
    std::string_view rest = file;
    if (remove_suffix(rest, ".gz")) {
        candidate.compression = 1;
    } else if (remove_suffix(rest, ".xz")) {
        candidate.compression = 2;
    }
    candidate.stem = rest;
    bool labels = false;
    if (remove_suffix(rest, "-labels-idx1-ubyte") || remove_suffix(rest, "-labels.idx1-ubyte")) {
        labels = true;
    } else if (!remove_suffix(rest, "-images-idx3-ubyte") &&
               !remove_suffix(rest, "-images.idx3-ubyte") &&
               !remove_suffix(rest, "-images-idx4-ubyte") &&
               !remove_suffix(rest, "-images.idx4-ubyte")) {
        return std::nullopt;
    }
    if (remove_suffix(rest, "train")) {
        candidate.role = labels ? train_labels : train_images;
    } else if (remove_suffix(rest, "t10k") || remove_suffix(rest, "test")) {
        candidate.role = labels ? test_labels : test_images;
    } else {
        return std::nullopt;
    }
    if (!rest.empty() && (rest.size() < 2 || !rest.ends_with('-'))) {
        return std::nullopt;
    }
    candidate.prefix = rest;
    return candidate;
}

// The entries of a directory sorted by name; none when it cannot be read.
std::vector<fs::path> list_directory(const fs::path& directory) {
    std::vector<fs::path> entries;
    std::error_code error;
    for (fs::directory_iterator it(directory, error), end; !error && it != end;
         it.increment(error)) {
        entries.push_back(it->path());
    }
    std::sort(entries.begin(), entries.end());
    return entries;
}

bool directory_exists(const fs::path& path) {
    std::error_code error;
    return fs::is_directory(path, error);
}

std::string describe_contents(const fs::path& directory) {
    constexpr std::size_t shown_elems = 12;
    const std::vector<fs::path> entries = list_directory(directory);
    std::string text;
    for (std::size_t i = 0; i < std::min(entries.size(), shown_elems); ++i) {
        text += fmt::format("{}{}", i == 0 ? "" : ", ", entries[i].filename().string());
    }
    if (entries.size() > shown_elems) {
        text += fmt::format(", and {} more", entries.size() - shown_elems);
    }
    return text.empty() ? "nothing that can be listed" : text;
}

// What one directory holds: no file of a set, a set with a problem, or a complete set.
struct SetFiles {
    bool any = false;
    std::string problem;  // empty: `paths` is complete
    std::array<fs::path, role_elems> paths;
    bool complete() const { return any && problem.empty(); }
};

SetFiles locate_files(const fs::path& directory) {
    std::array<std::vector<Candidate>, role_elems> by_role;
    SetFiles files;
    for (const fs::path& entry : list_directory(directory)) {
        auto candidate = parse_file_name(entry.filename().string());
        if (candidate && !directory_exists(entry)) {
            files.any = true;
            by_role[candidate->role].push_back(std::move(*candidate));
        }
    }
    const Candidate* first = nullptr;
    for (std::size_t role = 0; role < role_elems; ++role) {
        std::vector<Candidate>& candidates = by_role[role];
        if (candidates.empty()) {
            files.problem = fmt::format(
                "{}: no {}: expected {} (`.idx` for `-idx`, idx4 for idx3, and .gz or .xz at the "
                "end also do); the directory holds: {}",
                directory.string(), role_names[role], role_patterns[role],
                describe_contents(directory));
            return files;
        }
        std::stable_sort(candidates.begin(), candidates.end(), [](const auto& a, const auto& b) {
            return a.compression < b.compression;
        });
        const Candidate& chosen = candidates.front();
        for (const Candidate& other : candidates) {
            if (other.stem != chosen.stem) {
                files.problem = fmt::format(
                    "{}: ambiguous {}: both {} and {} match; keep one set in a directory",
                    directory.string(), role_names[role], chosen.file, other.file);
                return files;
            }
        }
        if (first == nullptr) {
            first = &chosen;
        } else if (chosen.prefix != first->prefix) {
            files.problem = fmt::format(
                "{}: the files {} and {} belong to different sets; keep one set in a directory",
                directory.string(), first->file, chosen.file);
            return files;
        }
        files.paths[role] = directory / chosen.file;
    }
    return files;
}

// ---- The directory of a set ----

std::string lower_case(std::string text) {
    for (char& c : text) {
        if (c >= 'A' && c <= 'Z') {
            c = static_cast<char>(c - 'A' + 'a');
        }
    }
    return text;
}

// The last component, also of "." and "a/".
std::string last_component(const fs::path& path) {
    std::error_code error;
    fs::path full = fs::absolute(path, error).lexically_normal();
    if (!full.has_filename()) {
        full = full.parent_path();
    }
    return full.filename().string();
}

std::string set_name(const fs::path& directory) {
    const std::string name = last_component(directory);
    return name == "raw" ? last_component(directory / "..") : name;
}

struct Location {
    fs::path directory;
    SetFiles files;
};

// `directory` or `directory`/raw, whichever first holds files of a set. Throws if they are
// incomplete: a half-copied set must not silently be replaced by another one further on.
std::optional<Location> locate_in(const fs::path& directory) {
    for (const fs::path& place : {directory, directory / "raw"}) {
        SetFiles files = locate_files(place);
        if (!files.any) {
            continue;
        }
        if (!files.problem.empty()) {
            throw input_error(files.problem);
        }
        return Location{place, std::move(files)};
    }
    return std::nullopt;
}

Location locate_directory(const fs::path& directory) {
    std::error_code error;
    if (!fs::exists(directory, error)) {
        throw input_error(fmt::format("{}: no such data set directory{}", directory.string(),
                                      error ? ": " + error.message() : ""));
    }
    if (!directory_exists(directory)) {
        throw input_error(
            fmt::format("{}: expected a data set directory, found a file; give the directory that "
                        "holds it",
                        directory.string()));
    }
    if (auto location = locate_in(directory)) {
        return std::move(*location);
    }
    throw input_error(locate_files(directory).problem);  // names the first missing file
}

Location locate_name(const std::string& name) {
    const std::string wanted = lower_case(name);
    std::string looked_at;
    const auto note_place = [&looked_at](const fs::path& place) {
        looked_at += fmt::format(
            "\n  {} ({})", place.string(),
            directory_exists(place) ? "no IDX files of a set in it" : "no such directory");
    };
    note_place(fs::path(".") / name);  // locate() looked there
    for (const fs::path& root : dataset_search_path()) {
        // The exact spelling first, then others in alphabetical order.
        std::vector<fs::path> places{root / name};
        for (const fs::path& entry : list_directory(root)) {
            if (entry != places.front() && lower_case(entry.filename().string()) == wanted) {
                places.push_back(entry);
            }
        }
        if (lower_case(set_name(root)) == wanted) {
            places.push_back(root);
        }
        for (const fs::path& place : places) {
            if (auto location = locate_in(place)) {
                return std::move(*location);
            }
            note_place(place);
        }
    }
    std::string advice = "give the directory of the set, or put its parent into GYRE_DATA";
    if (wanted == "fashion-mnist") {
        advice = "install it with `apt-get install dataset-fashion-mnist`, or " + advice;
    } else if (wanted == "mnist") {
        advice = "download it with `scripts/get-mnist.sh`, or " + advice;
    }
    throw input_error(
        fmt::format("data set \"{}\" not found; {}. Places looked at:{}", name, advice, looked_at));
}

Location locate(const std::string& data) {
    if (data.empty()) {
        throw usage_error("the data set's name is empty; give a name or a directory");
    }
    if (data.find('/') != std::string::npos || data == "." || data == "..") {
        return locate_directory(data);
    }
    if (directory_exists(data)) {
        if (auto location = locate_in(data)) {
            return std::move(*location);
        }
    }
    return locate_name(data);
}

// ---- The contents of a set ----

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

// The start of every message about one element: its file and offset.
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

// What labels must stay below.
struct ClassLimit {
    std::int64_t classes = 0;
    std::string reason;
};

// The user's number of classes, or as many as labels alone are believed: one damaged label must
// not make a last layer of gigabytes.
ClassLimit class_limit(std::optional<int> classes, std::int64_t train_images) {
    constexpr std::int64_t most_classes = 65536;
    if (classes) {
        return {*classes, fmt::format("there are {} classes", *classes)};
    }
    if (train_images < most_classes) {
        return {train_images, fmt::format("there are {} training images", train_images)};
    }
    return {most_classes,
            fmt::format("more than {} classes are not taken from labels alone", most_classes)};
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
                "right, give --classes {} or more",
                element_place(path, array, i), i, limit.classes - 1, limit.reason, value,
                value + 1));
        }
        labels[static_cast<std::size_t>(i)] = static_cast<std::int32_t>(value);
    });
    return labels;
}

// `classes`: as the user gave them; `train_images`: none where this is the training set.
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

std::string describe_shape(const ImageSet& set) {
    return fmt::format("{}x{}x{} (channels x height x width)", set.channels, set.height, set.width);
}

}  // namespace

std::vector<fs::path> dataset_search_path() {
    std::vector<fs::path> places;
    if (const char* variable = std::getenv("GYRE_DATA")) {
        std::string_view rest = variable;
        while (!rest.empty()) {
            const std::string_view entry = rest.substr(0, rest.find(':'));
            rest.remove_prefix(std::min(entry.size() + 1, rest.size()));
            if (!entry.empty()) {
                places.emplace_back(entry);
            }
        }
    }
    places.emplace_back("data-cache");
    const char* home = std::getenv("HOME");
    if (home != nullptr && *home != '\0') {
        places.push_back(fs::path(home) / ".cache" / "gyre");
    }
    places.emplace_back("/usr/local/share/datasets");
    places.emplace_back("/usr/share/datasets");
    return places;
}

std::vector<FoundDataset> find_datasets() {
    std::vector<FoundDataset> found;
    std::set<fs::path> seen;  // GYRE_DATA may repeat a default folder
    const auto add_if_complete = [&](const fs::path& directory) {
        std::error_code error;
        if (locate_files(directory).complete() &&
            seen.insert(fs::weakly_canonical(directory, error)).second) {
            found.push_back({set_name(directory), directory});
        }
    };
    for (const fs::path& root : dataset_search_path()) {
        add_if_complete(root);
        for (const fs::path& entry : list_directory(root)) {
            add_if_complete(entry);
            add_if_complete(entry / "raw");
        }
    }
    return found;
}

Dataset load_dataset(const DatasetOptions& options) {
    if (options.limit && *options.limit < 1) {
        throw usage_error(
            fmt::format("limit of training images: expected 1 or more, found {}", *options.limit));
    }
    if (options.classes && *options.classes < 2) {
        throw usage_error(fmt::format("--classes: expected 2 or more, found {}", *options.classes));
    }
    const Location location = locate(options.data);
    const auto& paths = location.files.paths;

    Dataset set;
    set.name = set_name(location.directory);
    set.directory = location.directory.string();
    ImageSet& train = set.train;
    train = read_image_set(paths[train_images], paths[train_labels], options.classes, {});
    set.test = read_image_set(paths[test_images], paths[test_labels], options.classes, train.count);
    const auto largest = [](const ImageSet& images) {
        return *std::max_element(images.labels.begin(), images.labels.end());
    };
    set.classes = options.classes.value_or(std::max(largest(train), largest(set.test)) + 1);
    if (set.classes < 2) {
        throw input_error(
            fmt::format("{}: expected labels of at least 2 classes, found only label 0, as in {}; "
                        "if the set has more classes, give their number with --classes",
                        train.labels_path, set.test.labels_path));
    }
    const ImageSet& test = set.test;
    if (train.channels != test.channels || train.height != test.height ||
        train.width != test.width) {
        throw input_error(fmt::format(
            "training and test images differ in shape: {} has {}, {} has {}", train.images_path,
            describe_shape(train), test.images_path, describe_shape(test)));
    }

    if (options.limit && *options.limit < train.count) {
        const auto image_elems = train.pixels.size() / static_cast<std::size_t>(train.count);
        train.count = *options.limit;
        train.labels.resize(static_cast<std::size_t>(train.count));
        train.labels.shrink_to_fit();
        train.pixels.resize(static_cast<std::size_t>(train.count) * image_elems);
        train.pixels.shrink_to_fit();
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
        double sum = 0;  // exact: an integer far below 2^53
        for (std::size_t value = 0; value < histogram.size(); ++value) {
            sum += static_cast<double>(histogram[value]) * static_cast<double>(value);
        }
        const double mean = sum / elems;
        double squares = 0;
        for (std::size_t value = 0; value < histogram.size(); ++value) {
            const double distance = static_cast<double>(value) - mean;
            squares += static_cast<double>(histogram[value]) * distance * distance;
        }
        // A constant channel would divide 0 by 0; with 1 it becomes all zeros, as it carries no
        // information.
        const bool constant = std::count(histogram.begin(), histogram.end(), 0) >=
                              static_cast<std::ptrdiff_t>(histogram.size()) - 1;
        result.mean.push_back(static_cast<float>(mean / 255));
        result.stddev.push_back(constant ? 1.0F
                                         : static_cast<float>(std::sqrt(squares / elems) / 255));
    }
    return result;
}

}  // namespace gyre::data
