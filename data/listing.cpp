#include "data/listing.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <charconv>
#include <map>
#include <string_view>
#include <system_error>
#include <utility>

#include "base/error.hpp"
#include "base/printable.hpp"
#include "data/dataset_files.hpp"
#include "data/formats.hpp"
#include "data/tar.hpp"

namespace gyre::data {
namespace {

namespace fs = std::filesystem;

using ByClass = std::map<std::string, std::vector<PictureFile>>;

bool hidden(const fs::path& path) {
    return path.filename().string().starts_with('.');
}

bool is_class_folder(const fs::path& path) {
    std::error_code error;
    return fs::is_directory(path, error) && !hidden(path);
}

bool has_class_folders(const fs::path& directory) {
    return std::ranges::any_of(list_directory(directory), is_class_folder);
}

std::vector<fs::path> class_folders(const fs::path& directory) {
    std::error_code error;
    std::vector<fs::path> folders = list_directory(directory, error);
    if (error) {
        throw input_error(fmt::format("{}: cannot read: {}", directory.string(), error.message()));
    }
    std::erase_if(folders, [](const fs::path& path) { return !is_class_folder(path); });
    return folders;
}

[[noreturn]] void refuse_kind(const fs::path& picture) {
    throw input_error(
        fmt::format("{}: only PNG, JPEG and WebP pictures are read; convert it, as "
                    "`convert {} NAME.png` "
                    "does, or remove it",
                    picture.string(), picture.filename().string()));
}

std::vector<fs::path> pictures_in(const fs::path& folder) {
    std::vector<fs::path> files;
    std::error_code error;
    for (fs::recursive_directory_iterator it(folder, error), end; !error && it != end;
         it.increment(error)) {
        if (hidden(it->path())) {
            it.disable_recursion_pending();
        } else if (is_picture_name(it->path())) {
            files.push_back(it->path());
        } else if (is_other_picture_name(it->path())) {
            refuse_kind(it->path());
        }
    }
    if (error) {
        throw input_error(fmt::format("{}: cannot read: {}", folder.string(), error.message()));
    }
    if (files.empty()) {
        throw input_error(
            fmt::format("{}: this class has no pictures: expected .png, .jpg, .jpeg or .webp files "
                        "in it; add some, "
                        "or remove the folder",
                        folder.string()));
    }
    std::sort(files.begin(), files.end());
    return files;
}

// The part of a set that a tar file's name says: the first of its words, between hyphens,
// underscores or dots, that names one; empty: none does.
std::string part_said_by(const fs::path& file) {
    const std::string stem = file.stem().string();
    for (std::string_view rest = stem; !rest.empty();) {
        const std::size_t length = std::min(rest.find_first_of("-_."), rest.size());
        const std::string_view word = rest.substr(0, length);
        if (word == "train" || word == "test" || word == "val") {
            return std::string(word);
        }
        if (word == "validation") {
            return "val";
        }
        rest.remove_prefix(std::min(length + 1, rest.size()));
    }
    return {};
}

// The tar files in a directory whose names say this part; with an empty one, all of them. Sorted.
std::vector<fs::path> tar_files(const fs::path& directory, const std::string& part) {
    std::vector<fs::path> files = list_directory(directory);
    std::erase_if(files, [&](const fs::path& file) {
        return file.extension() != ".tar" || hidden(file) ||
               (!part.empty() && part_said_by(file) != part);
    });
    return files;
}

// train: nullptr if this is the training set.
void require_known(const std::string& name, const PicturePlace& place,
                   const PictureListing* train) {
    if (train == nullptr ||
        std::binary_search(train->classes.begin(), train->classes.end(), name)) {
        return;
    }
    throw input_error(
        fmt::format("{}: this class is not in the training set; expected a folder of the same "
                    "name there (it has {}); rename or remove one of them",
                    (place.path() / name).string(),
                    train->classes.empty() ? "numbers instead of names"
                                           : fmt::format("{}", fmt::join(train->classes, ", "))));
}

PictureListing listing_of(ByClass&& by_class, const PictureListing* train) {
    PictureListing listing;
    for (const auto& [name, files] : by_class) {
        listing.classes.push_back(name);
    }
    const std::vector<std::string>& classes = train != nullptr ? train->classes : listing.classes;
    for (auto& [name, files] : by_class) {
        const auto found = std::lower_bound(classes.begin(), classes.end(), name);
        for (PictureFile& file : files) {
            listing.files.push_back(std::move(file));
            listing.labels.push_back(static_cast<std::int32_t>(found - classes.begin()));
        }
    }
    return listing;
}

ByClass list_folders(const PicturePlace& place, const PictureListing* train) {
    ByClass by_class;
    for (const fs::path& folder : class_folders(place.folder)) {
        const std::string name = folder.filename().string();
        require_known(name, place, train);
        std::vector<PictureFile>& files = by_class[name];
        for (const fs::path& file : pictures_in(folder)) {
            files.push_back({file.string()});
        }
    }
    if (by_class.empty()) {
        throw input_error(fmt::format(
            "{}: found no folders with pictures; expected one for each class, as in train",
            place.folder.string()));
    }
    return by_class;
}

// ---- Tar files ----

// Without the ends of its file's name: that of 1.jpg and 1.cls is 1.
std::string key_of(const std::string& member) {
    const std::size_t folder = member.rfind('/') + 1;  // 0: in none
    return member.substr(0, member.find('.', folder));
}

struct Shards {
    std::vector<fs::path> files;
    std::vector<std::map<std::string, std::string>> labels;  // [files], by key
    std::vector<PictureFile> pictures;
    std::vector<std::size_t> file_of;  // [pictures]
    bool has_labels = false;
};

Shards read_shards(const std::vector<fs::path>& files) {
    Shards all{files, {}, {}, {}, false};
    for (const fs::path& file : files) {
        auto& labels = all.labels.emplace_back();
        visit_tar(file, [&](const TarMember& member) {
            // A path from the root counts from the tar file's folder, as where tar unpacks it.
            const fs::path name = fs::path(member.name).lexically_normal().relative_path();
            const bool picture = is_picture_name(name);
            if (std::any_of(name.begin(), name.end(), hidden)) {
                return;
            }
            if (member.is_link && (picture || name.extension() == ".cls")) {
                throw input_error(
                    fmt::format("{}: a link in the tar file; pack a copy of what it points to, as "
                                "tar's options "
                                "dereference and hard-dereference do",
                                (file / name).string()));
            }
            if (name.extension() == ".cls") {
                labels[key_of(name.string())] = member.bytes.substr(0, 64);
                all.has_labels = true;
            } else if (picture) {
                all.pictures.push_back(
                    {file.string(), name.string(), member.offset, member.bytes.size()});
                all.file_of.push_back(all.labels.size() - 1);
            } else if (is_other_picture_name(name)) {
                refuse_kind(file / name);
            }
        });
    }
    if (all.pictures.empty()) {
        throw input_error(
            fmt::format("{}: no pictures are in it; expected CLASS/NAME.jpg, or KEY.jpg and "
                        "KEY.cls (.png, .jpeg and .webp, too)",
                        files.front().string()));
    }
    return all;
}

// With the folders in the tar files as classes.
ByClass by_folder(std::vector<PictureFile>&& pictures, const PicturePlace& place,
                  const PictureListing* train) {
    // In the order of std::filesystem::path: folder by folder.
    const auto order = [](char c) { return c == '/' ? 0 : static_cast<unsigned char>(c) + 1; };
    ByClass by_class;
    for (PictureFile& picture : pictures) {
        const std::string& name = picture.member;
        const std::size_t begin = name.starts_with(place.part + '/') ? place.part.size() + 1 : 0;
        const std::size_t end = name.find('/', begin);
        if (end == std::string::npos) {
            throw input_error(
                fmt::format("{}: this picture has no class: expected it in the folder of its "
                            "class, or its number beside it in {}.cls",
                            picture.name(), key_of(name)));
        }
        by_class[name.substr(begin, end - begin)].push_back(std::move(picture));
    }
    for (auto& [name, files] : by_class) {
        require_known(name, place, train);
        std::stable_sort(
            files.begin(), files.end(), [&](const PictureFile& a, const PictureFile& b) {
                return std::ranges::lexicographical_compare(a.member, b.member, {}, order, order);
            });
    }
    return by_class;
}

// With the labels beside the pictures.
PictureListing by_number(Shards&& all, const PictureListing* train, std::optional<int> classes) {
    const ClassLimit limit = class_limit(
        classes,
        static_cast<std::int64_t>(train != nullptr ? train->files.size() : all.pictures.size()));
    PictureListing listing;
    for (std::size_t i = 0; i < all.pictures.size(); ++i) {
        const PictureFile& picture = all.pictures[i];
        const std::string key = key_of(picture.member);
        const auto text = all.labels[all.file_of[i]].extract(key);
        if (text.empty()) {
            throw input_error(
                fmt::format("{}: this picture has no label: expected the number of its class in "
                            "{}.cls in the same tar file, and one picture for each",
                            picture.name(), key));
        }
        const std::string_view digits = text.mapped();
        std::int64_t label = -1;
        const auto [end, error] =
            std::from_chars(digits.data(), digits.data() + digits.size(), label);
        if (error != std::errc{} || label < 0 ||
            std::string_view(end).find_first_not_of(" \r\n") != std::string_view::npos) {
            throw input_error(fmt::format("{}.cls: expected the number of a class, found '{}'",
                                          picture.file + "/" + key,
                                          comm::printable(text.mapped())));
        }
        if (label >= limit.classes) {
            throw input_error(fmt::format(
                "{}.cls: expected 0..{} because {}, found {}; if the label is right, "
                "give `classes` {} or more",
                picture.file + "/" + key, limit.classes - 1, limit.reason, label, label + 1));
        }
        listing.labels.push_back(static_cast<std::int32_t>(label));
    }
    for (std::size_t shard = 0; shard < all.labels.size(); ++shard) {
        if (!all.labels[shard].empty()) {
            const std::string& key = all.labels[shard].begin()->first;
            throw input_error(fmt::format(
                "{}.cls: a label without a picture; expected {}.jpg, .jpeg, .png or .webp "
                "beside it",
                (all.files[shard] / key).string(), key));
        }
    }
    listing.files = std::move(all.pictures);
    return listing;
}

}  // namespace

std::optional<PicturePlace> find_pictures(const fs::path& directory, const std::string& part) {
    PicturePlace place{part, directory / part, {}};
    if (has_class_folders(place.folder)) {
        return place;
    }
    place.shards = tar_files(place.folder, "");
    if (place.shards.empty()) {
        place.shards = tar_files(directory, part);
    }
    std::error_code error;
    return !place.shards.empty() || fs::is_directory(place.folder, error) ? std::optional(place)
                                                                          : std::nullopt;
}

bool has_pictures(const fs::path& directory) {
    const auto place = find_pictures(directory, "train");
    return place && (!place->shards.empty() || has_class_folders(place->folder));
}

PictureListing list_pictures(const PicturePlace& place, const PictureListing* train,
                             std::optional<int> classes) {
    if (place.shards.empty()) {
        return listing_of(list_folders(place, train), train);
    }
    Shards all = read_shards(place.shards);
    if (!all.has_labels) {
        return listing_of(by_folder(std::move(all.pictures), place, train), train);
    }
    if (train != nullptr && !train->classes.empty()) {
        throw input_error(fmt::format(
            "{}: its classes are numbers, those of the training set names: {}; pack both "
            "alike",
            place.path().string(), fmt::join(train->classes, ", ")));
    }
    return by_number(std::move(all), train, classes);
}

}  // namespace gyre::data
