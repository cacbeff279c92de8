// CIFAR-10 and CIFAR-100 in their binary version: each record is a label (CIFAR-100: a coarse and
// a fine label) and 3 x 32 x 32 bytes.
#include <fmt/format.h>

#include <algorithm>
#include <fstream>

#include "base/error.hpp"
#include "data/decompress.hpp"
#include "data/formats.hpp"

namespace gyre::data {
namespace {

namespace fs = std::filesystem;

constexpr std::size_t kImageBytes = std::size_t{3} * 32 * 32;

struct Kind {
    std::size_t label_bytes = 1;  // the last of them is the label
    int classes = 10;
    std::vector<const char*> train, test;
    const char* names;
};

const Kind& kind_of(Format format) {
    static const Kind kinds[] = {{1,
                                  10,
                                  {"data_batch_1.bin", "data_batch_2.bin", "data_batch_3.bin",
                                   "data_batch_4.bin", "data_batch_5.bin"},
                                  {"test_batch.bin"},
                                  "batches.meta.txt"},
                                 {2, 100, {"train.bin"}, {"test.bin"}, "fine_label_names.txt"}};
    return kinds[format == Format::cifar10 ? 0 : 1];
}

std::vector<std::uint8_t> read_all(const fs::path& path) {
    const std::unique_ptr<Source> source = open_source(path);
    std::vector<std::uint8_t> bytes(static_cast<std::size_t>(source->known_bytes().value_or(0)));
    bytes.resize(source->read(reinterpret_cast<std::byte*>(bytes.data()), bytes.size()));
    return bytes;
}

ImageSet read_records(const fs::path& directory, const std::vector<const char*>& files,
                      const Kind& kind) {
    const std::size_t record_bytes = kind.label_bytes + kImageBytes;
    ImageSet set;
    set.channels = 3;
    set.height = set.width = 32;
    std::vector<std::uint8_t> pixels;
    for (const char* file : files) {
        const fs::path path = directory / file;
        const std::vector<std::uint8_t> bytes = read_all(path);
        if (bytes.empty() || bytes.size() % record_bytes != 0) {
            throw input_error(fmt::format(
                "{}: expected records of {} bytes ({} and 3 x 32 x 32 pixels), found {} bytes: the "
                "file is truncated or not from CIFAR-{}; download and unpack the set again",
                path.string(), record_bytes,
                kind.label_bytes == 1 ? "a label" : "a coarse and a fine label", bytes.size(),
                kind.classes));
        }
        for (std::size_t at = 0; at < bytes.size(); at += record_bytes) {
            const std::uint8_t* image = bytes.data() + at + kind.label_bytes;
            const std::uint8_t label = image[-1];
            if (label >= kind.classes) {
                throw input_error(fmt::format(
                    "{}: byte offset {}: expected a label in 0..{}, found {}; download and unpack "
                    "the set again",
                    path.string(), at + kind.label_bytes - 1, kind.classes - 1, label));
            }
            set.labels.push_back(label);
            pixels.insert(pixels.end(), image, image + kImageBytes);
        }
    }
    set.count = static_cast<std::int64_t>(set.labels.size());
    set.pixels = std::move(pixels);
    set.images_path = set.labels_path = (directory / files.front()).string();
    return set;
}

// Returns the non-empty lines of a file; none if there is no such file.
std::vector<std::string> read_names(const fs::path& path) {
    std::vector<std::string> names;
    std::ifstream in(path);
    for (std::string line; std::getline(in, line);) {
        if (line.ends_with('\r')) {
            line.pop_back();
        }
        if (!line.empty()) {
            names.push_back(line);
        }
    }
    return names;
}

}  // namespace

Dataset load_cifar(const DatasetFiles& files) {
    const Kind& kind = kind_of(files.format);
    Dataset set;
    set.train = read_records(files.directory, kind.train, kind);
    set.test = read_records(files.directory, kind.test, kind);
    set.class_names = read_names(files.directory / kind.names);
    if (set.class_names.size() != static_cast<std::size_t>(kind.classes)) {
        set.class_names.clear();
    }
    return set;
}

}  // namespace gyre::data
