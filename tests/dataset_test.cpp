#include "data/dataset.hpp"

#include <zlib.h>

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <limits>
#include <string>
#include <utility>

#include "data/idx.hpp"
#include "tests/catch.hpp"
#include "tests/expect_error.hpp"
#include "tests/temp_dir.hpp"

using namespace gyre;
using namespace gyre::data;
using gyre::test::expect_error;
using gyre::test::TempDir;
namespace fs = std::filesystem;

namespace {

// Sets (or with nullptr unsets) an environment variable for a scope.
class ScopedEnv {
 public:
    ScopedEnv(const char* name, const char* value) : name_(name) {
        if (const char* old = std::getenv(name)) {
            old_ = old;
        }
        set(value);
    }
    ~ScopedEnv() { set(old_ ? old_->c_str() : nullptr); }
    ScopedEnv(const ScopedEnv&) = delete;
    ScopedEnv& operator=(const ScopedEnv&) = delete;

 private:
    void set(const char* value) const {
        if (value != nullptr) {
            setenv(name_.c_str(), value, 1);
        } else {
            unsetenv(name_.c_str());
        }
    }
    std::string name_;
    std::optional<std::string> old_;
};

class ScopedWorkingDirectory {
 public:
    explicit ScopedWorkingDirectory(const fs::path& path) : old_(fs::current_path()) {
        fs::current_path(path);
    }
    ~ScopedWorkingDirectory() {
        std::error_code ignored;
        fs::current_path(old_, ignored);
    }
    ScopedWorkingDirectory(const ScopedWorkingDirectory&) = delete;
    ScopedWorkingDirectory& operator=(const ScopedWorkingDirectory&) = delete;

 private:
    fs::path old_;
};

template <class T>
IdxArray array_of(IdxType type, std::vector<std::int64_t> dims, const std::vector<T>& values) {
    IdxArray array;
    array.type = type;
    array.dims = std::move(dims);
    array.payload.resize(values.size() * sizeof(T));
    if (!values.empty()) {
        std::memcpy(array.payload.data(), values.data(), array.payload.size());
    }
    return array;
}

IdxArray labels_of(const std::vector<std::uint8_t>& labels) {
    return array_of(IdxType::u8, {static_cast<std::int64_t>(labels.size())}, labels);
}

// Pixel i of the whole array is i + first, modulo 256.
IdxArray images_of(std::vector<std::int64_t> dims, int first = 0) {
    std::int64_t elems = 1;
    for (const std::int64_t dim : dims) {
        elems *= dim;
    }
    std::vector<std::uint8_t> values(static_cast<std::size_t>(elems));
    for (std::size_t i = 0; i < values.size(); ++i) {
        values[i] = static_cast<std::uint8_t>(i + static_cast<std::size_t>(first));
    }
    return array_of(IdxType::u8, std::move(dims), values);
}

// The four files of a set: 6 training and 3 test images of 4x5 pixels, 3 classes.
struct SetArrays {
    IdxArray train_images = images_of({6, 4, 5});
    IdxArray train_labels = labels_of({0, 1, 2, 2, 1, 0});
    IdxArray test_images = images_of({3, 4, 5}, 100);
    IdxArray test_labels = labels_of({2, 0, 1});
};

constexpr const char* train_images_file = "train-images-idx3-ubyte";
constexpr const char* train_labels_file = "train-labels-idx1-ubyte";
constexpr const char* test_images_file = "t10k-images-idx3-ubyte";
constexpr const char* test_labels_file = "t10k-labels-idx1-ubyte";

void write_set(const fs::path& dir, const SetArrays& set = {}) {
    fs::create_directories(dir);
    write_idx(dir / train_images_file, set.train_images);
    write_idx(dir / train_labels_file, set.train_labels);
    write_idx(dir / test_images_file, set.test_images);
    write_idx(dir / test_labels_file, set.test_labels);
}

Dataset load(const fs::path& dir) {
    return load_dataset({dir.string(), {}, {}});
}

// Writes `set` and requires that loading it fails with every part in the message.
void expect_bad_set(const SetArrays& set, std::initializer_list<std::string> parts,
                    std::optional<int> classes = {}) {
    const TempDir dir;
    write_set(dir.path(), set);
    expect_error(ExitCode::bad_input, parts, [&] {
        load_dataset({dir.path().string(), {}, classes});
    });
}

void compress_gzip(const fs::path& from, const fs::path& to) {
    std::ifstream in(from, std::ios::binary);
    const std::string data{std::istreambuf_iterator<char>(in), {}};
    gzFile out = gzopen(to.c_str(), "wb");
    REQUIRE(out != nullptr);
    REQUIRE(gzwrite(out, data.data(), static_cast<unsigned>(data.size())) ==
            static_cast<int>(data.size()));
    REQUIRE(gzclose(out) == Z_OK);
}

void write_text(const fs::path& path, const std::string& text) {
    std::ofstream(path) << text;
}

// No data set of this machine is visible through the environment or the working directory.
struct Isolated {
    TempDir dir;
    ScopedWorkingDirectory cwd{dir.path()};
    ScopedEnv home{"HOME", (dir.path() / "home").c_str()};
    ScopedEnv data{"GYRE_DATA", nullptr};
};

}  // namespace

TEST_CASE("data set: contents and shapes", "[data][dataset]") {
    const TempDir dir;
    const fs::path home = dir.path() / "shapes";
    write_set(home);
    const Dataset set = load(home);
    CHECK(set.name == "shapes");
    CHECK(set.directory == home.string());
    CHECK(set.classes == 3);
    CHECK(set.train.count == 6);
    CHECK(set.train.channels == 1);
    CHECK(set.train.height == 4);
    CHECK(set.train.width == 5);
    CHECK(set.train.labels == std::vector<std::int32_t>{0, 1, 2, 2, 1, 0});
    REQUIRE(set.train.pixels.size() == 120);
    CHECK(set.train.pixels[119] == 119);
    CHECK(set.train.images_path == (home / train_images_file).string());
    CHECK(set.train.labels_path == (home / train_labels_file).string());
    CHECK(set.test.count == 3);
    CHECK(set.test.pixels.at(0) == 100);
    CHECK(set.test.labels == std::vector<std::int32_t>{2, 0, 1});
    CHECK(set.test.images_path == (home / test_images_file).string());
}

TEST_CASE("data set: 3 channels, non-square", "[data][dataset]") {
    const TempDir dir;
    SetArrays arrays;
    arrays.train_images = images_of({6, 3, 2, 7});
    arrays.test_images = images_of({3, 3, 2, 7});
    write_set(dir.path(), arrays);
    const Dataset set = load(dir.path());
    CHECK(set.train.channels == 3);
    CHECK(set.train.height == 2);
    CHECK(set.train.width == 7);
    CHECK(set.test.channels == 3);
    CHECK(set.train.pixels.size() == 6 * 3 * 2 * 7);

    // One channel may be written with or without its dimension.
    arrays.train_images = images_of({6, 1, 2, 7});
    arrays.test_images = images_of({3, 2, 7});
    write_set(dir.path(), arrays);
    CHECK(load(dir.path()).train.channels == 1);
}

TEST_CASE("data set: number of classes", "[data][dataset]") {
    for (const int classes : {2, 5, 63}) {
        const TempDir dir;
        std::vector<std::uint8_t> labels(70);
        for (std::size_t i = 0; i < labels.size(); ++i) {
            labels[i] = static_cast<std::uint8_t>(i % static_cast<std::size_t>(classes));
        }
        SetArrays arrays;
        arrays.train_images = images_of({70, 2, 2});
        arrays.test_images = images_of({3, 2, 2});
        arrays.train_labels = labels_of(labels);
        arrays.test_labels = labels_of({0, 1, 1});
        write_set(dir.path(), arrays);
        CHECK(load(dir.path()).classes == classes);
    }
}

TEST_CASE("data set: classes that occur in the test labels only count too", "[data][dataset]") {
    const TempDir dir;
    SetArrays arrays;
    arrays.test_labels = labels_of({0, 4, 1});
    write_set(dir.path(), arrays);
    CHECK(load(dir.path()).classes == 5);
    // As does one of the two that there must be.
    arrays.train_labels = labels_of({0, 0, 0, 0, 0, 0});
    arrays.test_labels = labels_of({0, 1, 0});
    write_set(dir.path(), arrays);
    CHECK(load(dir.path()).classes == 2);
}

TEST_CASE("data set: more classes than images, or than 65536, need to be confirmed",
          "[data][dataset]") {
    // Bytes of float labels read as integers, as one changed type byte does.
    constexpr std::int32_t one = 0x3F800000;
    SetArrays arrays;
    arrays.train_labels =
        array_of(IdxType::i32, {6}, std::vector<std::int32_t>{0, 0, one, 0, 0, 0});
    expect_bad_set(arrays, {train_labels_file, "byte offset 16 of the IDX data", "image 2",
                            "6 training images", "found 1065353216", "--classes 1065353217"});
    arrays = {};
    arrays.train_labels = labels_of({0, 1, 2, 2, 1, 6});
    expect_bad_set(arrays, {train_labels_file, "byte offset 13", "found 6", "--classes 7"});
    arrays = {};
    arrays.test_labels = labels_of({0, 6, 1});
    expect_bad_set(arrays, {test_labels_file, "byte offset 9", "6 training images", "--classes 7"});

    const TempDir dir;
    write_set(dir.path(), arrays);
    CHECK(load_dataset({dir.path().string(), {}, 7}).classes == 7);

    arrays.train_images = images_of({65538, 1, 1});
    arrays.test_images = images_of({3, 1, 1});
    arrays.test_labels = labels_of({0, 1, 2});
    std::vector<std::int32_t> labels(65538);
    labels.back() = 65535;
    arrays.train_labels = array_of(IdxType::i32, {65538}, labels);
    write_set(dir.path(), arrays);
    CHECK(load(dir.path()).classes == 65536);
    labels.back() = 65536;
    arrays.train_labels = array_of(IdxType::i32, {65538}, labels);
    write_set(dir.path(), arrays);
    expect_error(ExitCode::bad_input, {"image 65537", "more than 65536 classes", "--classes 65537"},
                 [&] { load(dir.path()); });
    CHECK(load_dataset({dir.path().string(), {}, 65537}).classes == 65537);
}

TEST_CASE("data set: option classes", "[data][dataset]") {
    const TempDir dir;
    write_set(dir.path());
    CHECK(load_dataset({dir.path().string(), {}, 10}).classes == 10);
    CHECK(load_dataset({dir.path().string(), {}, 3}).classes == 3);
    for (const int classes : {1, 0, -1}) {
        expect_error(ExitCode::usage, {"--classes", "expected 2 or more"}, [&] {
            load_dataset({dir.path().string(), {}, classes});
        });
    }
}

TEST_CASE("data set: option limit", "[data][dataset]") {
    const TempDir dir;
    write_set(dir.path());
    const Dataset set = load_dataset({dir.path().string(), 2, {}});
    CHECK(set.train.count == 2);
    CHECK(set.train.labels == std::vector<std::int32_t>{0, 1});
    REQUIRE(set.train.pixels.size() == 40);
    CHECK(set.train.pixels[39] == 39);
    CHECK(set.test.count == 3);
    CHECK(set.classes == 3);  // counted before limiting
    CHECK(load_dataset({dir.path().string(), 6, {}}).train.count == 6);
    CHECK(load_dataset({dir.path().string(), 7, {}}).train.count == 6);
    for (const std::int64_t limit : {0, -1}) {
        expect_error(ExitCode::usage, {"limit", "expected 1 or more"}, [&] {
            load_dataset({dir.path().string(), limit, {}});
        });
    }
}

TEST_CASE("data set: every element type for pixels and labels", "[data][dataset]") {
    const auto check = [](IdxType type, auto example) {
        using T = decltype(example);
        const TempDir dir;
        SetArrays arrays;
        std::vector<T> pixels(20);
        pixels[3] = 127;
        arrays.train_images = array_of(type, {5, 2, 2}, pixels);
        arrays.train_labels = array_of(type, {5}, std::vector<T>{0, 4, 1, 1, 1});
        arrays.test_images = images_of({3, 2, 2});
        write_set(dir.path(), arrays);
        const Dataset set = load(dir.path());
        CHECK(set.train.pixels.at(3) == 127);
        CHECK(set.train.pixels.at(4) == 0);
        CHECK(set.train.labels == std::vector<std::int32_t>{0, 4, 1, 1, 1});
        CHECK(set.classes == 5);
    };
    check(IdxType::u8, std::uint8_t{});
    check(IdxType::i8, std::int8_t{});
    check(IdxType::i16, std::int16_t{});
    check(IdxType::i32, std::int32_t{});
    check(IdxType::f32, float{});
    check(IdxType::f64, double{});
}

TEST_CASE("data set: pixel values out of range", "[data][dataset]") {
    SetArrays arrays;
    // Offset: 4 + 3 * 4 bytes of header, then 5 elements.
    arrays.train_images =
        array_of(IdxType::i16, {6, 1, 1}, std::vector<std::int16_t>{0, 1, 255, 2, 3, 256});
    expect_bad_set(arrays, {train_images_file, "byte offset 26 of the IDX data",
                            "expected an integer in 0..255", "found 256"});
    arrays.train_images =
        array_of(IdxType::i8, {6, 1, 1}, std::vector<std::int8_t>{0, -1, 0, 0, 0, 0});
    expect_bad_set(arrays, {train_images_file, "byte offset 17 of", "found -1"});
    arrays.train_images =
        array_of(IdxType::i32, {6, 1, 1}, std::vector<std::int32_t>{100000, 0, 0, 0, 0, 0});
    expect_bad_set(arrays, {train_images_file, "byte offset 16 of", "found 100000"});
    arrays.train_images =
        array_of(IdxType::f32, {6, 1, 1}, std::vector<float>{0, 0.5F, 0, 0, 0, 0});
    expect_bad_set(arrays, {train_images_file, "byte offset 20 of", "found 0.5"});
    arrays.train_images =
        array_of(IdxType::f64, {6, 1, 1},
                 std::vector<double>{0, 0, std::numeric_limits<double>::quiet_NaN(), 0, 0, 0});
    expect_bad_set(arrays, {train_images_file, "byte offset 32 of", "found nan"});
}

TEST_CASE("data set: labels out of range", "[data][dataset]") {
    SetArrays arrays;
    arrays.train_labels = array_of(IdxType::i16, {6}, std::vector<std::int16_t>{0, 1, -3, 0, 0, 0});
    expect_bad_set(arrays,
                   {train_labels_file, "byte offset 12 of the IDX data", "image 2", "found -3"});
    arrays.train_labels = array_of(IdxType::f32, {6}, std::vector<float>{0, 1, 1.5F, 0, 0, 0});
    expect_bad_set(arrays, {train_labels_file, "byte offset 16 of", "found 1.5"});
    arrays.train_labels = array_of(
        IdxType::i32, {6},
        std::vector<std::int32_t>{0, std::numeric_limits<std::int32_t>::max(), 0, 0, 0, 0});
    expect_bad_set(arrays, {train_labels_file, "byte offset 12 of", "found 2147483647"});

    expect_bad_set({},
                   {train_labels_file, "byte offset 10 of the IDX data", "image 2", "expected 0..1",
                    "2 classes", "found 2", "--classes 3"},
                   2);
    arrays = {};
    arrays.test_labels = labels_of({0, 3, 0});
    expect_bad_set(arrays,
                   {test_labels_file, "byte offset 9 of the IDX data", "expected 0..2", "3 classes",
                    "found 3", "--classes 4"},
                   3);
    arrays = {};
    arrays.test_labels = labels_of({0, 0, 0});
    arrays.train_labels = labels_of({0, 0, 0, 0, 0, 0});
    expect_bad_set(arrays, {train_labels_file, "at least 2 classes", "--classes"});
}

TEST_CASE("data set: arrays that do not belong together", "[data][dataset]") {
    SetArrays arrays;
    arrays.train_labels = labels_of({0, 1, 2});
    expect_bad_set(arrays, {train_images_file, "6 images", train_labels_file, "3 labels"});
    arrays = {};
    arrays.test_labels = labels_of({0, 1, 2, 1});
    expect_bad_set(arrays, {test_images_file, "3 images", test_labels_file, "4 labels"});
    arrays = {};
    arrays.test_images = images_of({3, 5, 4});
    expect_bad_set(arrays, {train_images_file, "1x4x5", test_images_file, "1x5x4"});
    arrays = {};
    arrays.test_images = images_of({3, 2, 4, 5});
    expect_bad_set(arrays, {"differ in shape", "1x4x5", "2x4x5"});
    arrays = {};
    arrays.train_images = images_of({6, 20});
    expect_bad_set(arrays, {train_images_file, "byte offset 3 of", "[N][H][W]", "found 2 (6x20)"});
    arrays = {};
    arrays.train_labels = array_of(IdxType::u8, {6, 1}, std::vector<std::uint8_t>(6));
    expect_bad_set(arrays, {train_labels_file, "1 dimension [N]", "found 2 dimensions (6x1)"});
    arrays = {};
    std::swap(arrays.train_images, arrays.train_labels);
    expect_bad_set(arrays, {train_labels_file, "expected labels with 1 dimension"});
}

TEST_CASE("data set: empty sets", "[data][dataset]") {
    SetArrays arrays;
    arrays.train_images = images_of({0, 4, 5});
    arrays.train_labels = labels_of({});
    expect_bad_set(arrays, {train_images_file, "at least one image", "0x4x5"});
    arrays = {};
    arrays.test_images = images_of({3, 0, 5});
    expect_bad_set(arrays, {test_images_file, "at least one pixel", "3x0x5"});
}

TEST_CASE("data set: malformed files are named", "[data][dataset]") {
    const TempDir dir;
    write_set(dir.path());
    write_text(dir.path() / test_images_file, "<html>");
    expect_error(ExitCode::bad_input, {test_images_file, "wrong magic"}, [&] { load(dir.path()); });
}

TEST_CASE("data set: every variant of the file names", "[data][dataset]") {
    for (const std::string prefix : {"", "kmnist-", "emnist-letters-"}) {
        for (const std::string split : {"t10k", "test"}) {
            for (const std::string images : {"-images-idx3-ubyte", "-images.idx3-ubyte",
                                             "-images-idx4-ubyte", "-images.idx4-ubyte"}) {
                for (const std::string labels : {"-labels-idx1-ubyte", "-labels.idx1-ubyte"}) {
                    for (const std::string suffix : {"", ".gz", ".xz"}) {
                        const TempDir dir;
                        const SetArrays arrays;
                        const auto path = [&](const std::string& middle) {
                            return dir.path() / (prefix + middle + suffix);
                        };
                        // Content decides on decompression, so plain content will do.
                        write_idx(path("train" + images), arrays.train_images);
                        write_idx(path("train" + labels), arrays.train_labels);
                        write_idx(path(split + images), arrays.test_images);
                        write_idx(path(split + labels), arrays.test_labels);
                        const Dataset set = load(dir.path());
                        CHECK(set.train.count == 6);
                        CHECK(set.test.count == 3);
                        CHECK(set.test.images_path == path(split + images).string());
                    }
                }
            }
        }
    }
}

TEST_CASE("data set: a plain file wins over a compressed one", "[data][dataset]") {
    const TempDir dir;
    write_set(dir.path());
    const fs::path plain = dir.path() / train_images_file;
    const std::string gz = plain.string() + ".gz";
    const std::string xz = plain.string() + ".xz";
    compress_gzip(plain, gz);
    write_text(xz, "never opened");
    CHECK(load(dir.path()).train.images_path == plain.string());
    fs::remove(plain);
    CHECK(load(dir.path()).train.images_path == gz);
    fs::remove(gz);
    expect_error(ExitCode::bad_input, {xz, "wrong magic"}, [&] { load(dir.path()); });
}

TEST_CASE("data set: ambiguous and mixed files", "[data][dataset]") {
    const TempDir dir;
    write_set(dir.path());
    const auto expect_ambiguous = [&](const std::string& other, const std::string& file) {
        write_text(dir.path() / other, "x");
        expect_error(ExitCode::bad_input, {dir.path().string(), "ambiguous", other, file},
                     [&] { load(dir.path()); });
        fs::remove(dir.path() / other);
    };
    expect_ambiguous("train-images.idx3-ubyte", train_images_file);
    expect_ambiguous("train-images-idx4-ubyte.gz", train_images_file);
    expect_ambiguous("kmnist-train-labels-idx1-ubyte", train_labels_file);
    expect_ambiguous("test-images-idx3-ubyte", test_images_file);
    expect_ambiguous("test-labels.idx1-ubyte.xz", test_labels_file);

    // Not names of a set: nothing before the dash, no dash, more after the name.
    for (const char* other : {"-train-images-idx3-ubyte", "xtrain-images-idx3-ubyte",
                              "train-images-idx3-ubyte.gz.part", "train-images-idx1-ubyte"}) {
        write_text(dir.path() / other, "x");
    }
    CHECK(load(dir.path()).train.count == 6);

    const std::string renamed = std::string("letters-") + test_labels_file;
    fs::rename(dir.path() / test_labels_file, dir.path() / renamed);
    expect_error(ExitCode::bad_input, {"different sets", train_images_file, renamed},
                 [&] { load(dir.path()); });
}

TEST_CASE("data set: a missing file", "[data][dataset]") {
    const std::vector<std::pair<std::string, std::string>> files{
        {train_images_file, "no training images"},
        {train_labels_file, "no training labels"},
        {test_images_file, "no test images"},
        {test_labels_file, "no test labels"}};
    for (const auto& [file, what] : files) {
        const TempDir dir;
        write_set(dir.path());
        write_text(dir.path() / "README", "x");
        fs::remove(dir.path() / file);
        expect_error(ExitCode::bad_input,
                     {dir.path().string(), what, file, "the directory holds: README, "},
                     [&] { load(dir.path()); });
    }
}

TEST_CASE("data set: directories without a set", "[data][dataset]") {
    const TempDir dir;
    expect_error(ExitCode::bad_input, {dir.path().string(), "no training images", "nothing"},
                 [&] { load(dir.path()); });
    expect_error(ExitCode::bad_input, {"no such data set directory"},
                 [&] { load(dir.path() / "missing"); });
    write_text(dir.path() / "file", "x");
    expect_error(ExitCode::bad_input, {"found a file"}, [&] { load(dir.path() / "file"); });
    for (int i = 0; i < 20; ++i) {
        write_text(dir.path() / ("other" + std::to_string(i)), "x");
    }
    expect_error(ExitCode::bad_input, {"file, other0, ", "and 9 more"}, [&] { load(dir.path()); });
    expect_error(ExitCode::usage, {"empty"}, [] { load_dataset({"", {}, {}}); });
}

TEST_CASE("data set: what counts as a directory", "[data][dataset]") {
    const Isolated isolated;
    write_set("here");
    write_set("torch/MNIST/raw");
    CHECK(load_dataset({"here", {}, {}}).directory == "here");
    CHECK(load_dataset({"./here", {}, {}}).name == "here");
    CHECK(load_dataset({"here/", {}, {}}).name == "here");
    CHECK(load_dataset({"torch/MNIST", {}, {}}).name == "MNIST");
    CHECK(load_dataset({"torch/MNIST/raw", {}, {}}).name == "MNIST");
    const fs::path base = isolated.dir.path();
    {
        const ScopedWorkingDirectory inside(base / "here");
        CHECK(load_dataset({".", {}, {}}).name == "here");
    }
    {
        fs::create_directories(base / "here" / "sub");
        const ScopedWorkingDirectory inside(base / "here" / "sub");
        CHECK(load_dataset({"..", {}, {}}).name == "here");
    }
    // A directory without a set does not hide the name.
    fs::create_directories("toy");
    write_set("data-cache/toy");
    CHECK(load_dataset({"toy", {}, {}}).directory == "data-cache/toy");
}

TEST_CASE("data set: search path", "[data][dataset]") {
    const Isolated isolated;
    const std::vector<fs::path> defaults = dataset_search_path();
    REQUIRE(defaults.size() == 4);
    CHECK(defaults[0].string() == "data-cache");
    CHECK(defaults[1].string() == (isolated.dir.path() / "home/.cache/gyre").string());
    CHECK(defaults[2].string() == "/usr/local/share/datasets");
    CHECK(defaults[3].string() == "/usr/share/datasets");
    {
        const ScopedEnv data("GYRE_DATA", ":first::second/sub:");
        const std::vector<fs::path> places = dataset_search_path();
        REQUIRE(places.size() == 6);
        CHECK(places[0].string() == "first");
        CHECK(places[1].string() == "second/sub");
        CHECK(places[2].string() == "data-cache");
    }
    const ScopedEnv no_home("HOME", nullptr);
    CHECK(dataset_search_path().size() == 3);
}

TEST_CASE("data set: precedence of the places for a name", "[data][dataset]") {
    const Isolated isolated;
    const ScopedEnv data("GYRE_DATA", "one:two:sets/Toy");
    const auto found = [] { return load_dataset({"toy", {}, {}}).directory; };
    write_set("home/.cache/gyre/toy");
    CHECK(found() == (isolated.dir.path() / "home/.cache/gyre/toy").string());
    write_set("data-cache/toy");
    CHECK(found() == "data-cache/toy");
    write_set("sets/Toy");  // GYRE_DATA points at the set itself
    CHECK(found() == "sets/Toy");
    write_set("two/toy/raw");
    CHECK(found() == "two/toy/raw");
    write_set("two/toy");
    CHECK(found() == "two/toy");
    write_set("one/TOY/raw");
    CHECK(found() == "one/TOY/raw");
    write_set("one/toy");  // the exact spelling wins
    CHECK(found() == "one/toy");
    CHECK(load_dataset({"TOY", {}, {}}).directory == "one/TOY/raw");
    CHECK(load_dataset({"TOY", {}, {}}).name == "TOY");

    // An incomplete set is reported, not passed over.
    fs::remove(fs::path("one/toy") / test_labels_file);
    expect_error(ExitCode::bad_input, {"one/toy", "no test labels"}, found);
}

TEST_CASE("data set: a name that is not found", "[data][dataset]") {
    const Isolated isolated;
    const ScopedEnv data("GYRE_DATA", "one");
    fs::create_directories("one/nonesuch");
    const auto load_name = [](const char* name) {
        return [name] { load_dataset({name, {}, {}}); };
    };
    expect_error(ExitCode::bad_input,
                 {"\"nonesuch\" not found", "one/nonesuch (no IDX files of a set in it)",
                  "data-cache/nonesuch (no such directory)", "home/.cache/gyre/nonesuch",
                  "/usr/local/share/datasets/nonesuch", "/usr/share/datasets/nonesuch",
                  "give the directory"},
                 load_name("nonesuch"));
    if (!fs::exists("/usr/share/datasets/mnist") &&
        !fs::exists("/usr/local/share/datasets/mnist")) {
        expect_error(ExitCode::bad_input, {"scripts/get-mnist.sh"}, load_name("mnist"));
    }
    if (!fs::exists("/usr/share/datasets/fashion-mnist") &&
        !fs::exists("/usr/local/share/datasets/fashion-mnist")) {
        expect_error(ExitCode::bad_input, {"apt-get install dataset-fashion-mnist"},
                     load_name("fashion-mnist"));
    }
}

TEST_CASE("data set: find_datasets", "[data][dataset]") {
    const Isolated isolated;
    const ScopedEnv data("GYRE_DATA", "torch:single:torch");
    write_set("torch/MNIST/raw");
    write_set("torch/b");
    write_set("torch/incomplete");
    fs::remove(fs::path("torch/incomplete") / train_labels_file);
    write_text("torch/file", "x");
    write_set("single");
    write_set("data-cache/c");
    const std::vector<FoundDataset> found = find_datasets();
    REQUIRE(found.size() >= 4);  // and those installed in /usr
    CHECK(found[0].name == "MNIST");
    CHECK(found[0].directory.string() == "torch/MNIST/raw");
    CHECK(found[1].name == "b");
    CHECK(found[1].directory.string() == "torch/b");
    CHECK(found[2].name == "single");
    CHECK(found[2].directory.string() == "single");
    CHECK(found[3].name == "c");
    for (std::size_t i = 4; i < found.size(); ++i) {
        CHECK(found[i].directory.string().rfind("/usr/", 0) == 0);
    }
}

TEST_CASE("data set: normalisation", "[data][dataset]") {
    ImageSet set;
    set.count = 2;
    set.channels = 2;
    set.height = 1;
    set.width = 2;
    // Channel 0: 0 255 255 0; channel 1: 51 throughout.
    set.pixels = {0, 255, 51, 51, 255, 0, 51, 51};
    const Normalisation result = measure_normalisation(set);
    REQUIRE(result.mean.size() == 2);
    REQUIRE(result.stddev.size() == 2);
    CHECK(result.mean[0] == 0.5F);
    CHECK(result.stddev[0] == 0.5F);
    CHECK(result.mean[1] == 0.2F);
    CHECK(result.stddev[1] == 1.0F);

    // Rounding must not make a constant channel look like one with a tiny deviation.
    set.channels = 1;
    set.width = 4;
    set.pixels.assign(8, 253);
    CHECK(measure_normalisation(set).stddev.at(0) == 1.0F);

    // One pixel that differs is not constant: the deviation is that of {0 x 7, 1}.
    set.pixels = {0, 0, 0, 0, 0, 0, 0, 1};
    CHECK(std::abs(measure_normalisation(set).stddev.at(0) - std::sqrt(7.0) / 8 / 255) < 1e-9);
}

TEST_CASE("data set: the real Fashion-MNIST", "[data][dataset]") {
    bool present = false;
    for (const FoundDataset& found : find_datasets()) {
        present = present || found.name == "fashion-mnist";
    }
    if (!present) {
        WARN("skipped: fashion-mnist not found; apt-get install dataset-fashion-mnist");
        return;
    }
    const Dataset set = load_dataset({"fashion-mnist", {}, {}});
    CHECK(set.train.count == 60000);
    CHECK(set.test.count == 10000);
    CHECK(set.train.channels == 1);
    CHECK(set.train.height == 28);
    CHECK(set.train.width == 28);
    CHECK(set.classes == 10);
    const Normalisation result = measure_normalisation(set.train);
    CHECK(std::abs(result.mean.at(0) - 0.2860F) < 1e-4F);
    CHECK(std::abs(result.stddev.at(0) - 0.3530F) < 1e-4F);
}
