#include "data/dataset_files.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <optional>
#include <set>
#include <string_view>
#include <system_error>
#include <utility>

#include "base/error.hpp"
#include "data/formats.hpp"

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

// The result of searching one directory: no file of a set, a set with a problem, or a complete set.
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
                "{}: no {}: expected {} (`.idx` for `-idx`, idx4 for idx3, and a final .gz or .xz "
                "are also accepted); the directory holds: {}",
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

// Returns the last component, even of "." and "a/".
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

DatasetFiles idx_files(const fs::path& directory, const SetFiles& files) {
    return {.format = Format::idx,
            .name = set_name(directory),
            .directory = directory,
            .train_images = files.paths[train_images],
            .train_labels = files.paths[train_labels],
            .test_images = files.paths[test_images],
            .test_labels = files.paths[test_labels]};
}

// Finds IDX files in `directory` or `directory`/raw, whichever first holds files of a set, or a set
// of another format. Throws if IDX files are incomplete: a half-copied set must not silently be
// replaced by another one later on the search path.
std::optional<DatasetFiles> locate_in(const fs::path& directory) {
    for (const fs::path& place : {directory, directory / "raw"}) {
        const SetFiles files = locate_files(place);
        if (!files.any) {
            continue;
        }
        if (!files.problem.empty()) {
            throw input_error(files.problem);
        }
        return idx_files(place, files);
    }
    auto other = find_other_set(directory);
    if (other) {
        other->name = last_component(directory);
    }
    return other;
}

// Says why a directory holds no set.
std::string describe_lack(const fs::path& directory) {
    for (const char* place : {"data_batch_1", "cifar-10-batches-py", "cifar-100-python"}) {
        std::error_code error;
        if (fs::exists(directory / place, error)) {
            return fmt::format(
                "{}: CIFAR's Python version is not supported: get the binary version, "
                "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz or "
                "cifar-100-binary.tar.gz, and unpack it",
                (directory / place).string());
        }
    }
    return locate_files(directory).problem +  // names the first missing file
           "; pictures are expected in train/CLASS/ and test/CLASS/, or in tar files with train "
           "and test "
           "in their names; docs/own-data.md lists all formats";
}

DatasetFiles locate_directory(const fs::path& directory) {
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
    throw input_error(describe_lack(directory));
}

DatasetFiles locate_name(const std::string& name) {
    const std::string wanted = lower_case(name);
    std::string looked_at;
    const auto note_place = [&looked_at](const fs::path& place) {
        looked_at +=
            fmt::format("\n  {} ({})", place.string(),
                        directory_exists(place) ? "no files of a set in it" : "no such directory");
    };
    note_place(fs::path(".") / name);  // locate_dataset() has looked there
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
    std::string advice = "give the directory of the set, or add its parent to GYRE_DATA";
    if (wanted == "fashion-mnist") {
        advice = "install it with `apt-get install dataset-fashion-mnist`, or " + advice;
    } else if (wanted == "mnist") {
        advice = "download it with gyre-get-mnist (here scripts/get-mnist.sh), or " + advice;
    }
    throw input_error(
        fmt::format("data set \"{}\" not found; {}. Places looked at:{}", name, advice, looked_at));
}

}  // namespace

DatasetFiles locate_dataset(const std::string& data) {
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

std::vector<fs::path> list_directory(const fs::path& directory, std::error_code& error) {
    std::vector<fs::path> entries;
    for (fs::directory_iterator it(directory, error), end; !error && it != end;
         it.increment(error)) {
        entries.push_back(it->path());
    }
    std::sort(entries.begin(), entries.end());
    return entries;
}

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
        if ((locate_files(directory).complete() || find_other_set(directory)) &&
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

}  // namespace gyre::data
