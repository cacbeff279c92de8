// The contents of a data set: what is loaded, what is rejected, and its normalisation.
#include "data/dataset.hpp"

#include <cmath>
#include <limits>
#include <map>
#include <numeric>
#include <string>
#include <utility>

#include "data/dataset_files.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/expect_error.hpp"
#include "tests/support/small_dataset.hpp"
#include "tests/support/temp_dir.hpp"

using namespace gyre;
using namespace gyre::data;
using namespace gyre::test;
namespace fs = std::filesystem;

namespace {

// Writes `set` and requires that loading it fails with every part in the message.
void expect_bad_set(const SetArrays& set, std::initializer_list<std::string> parts,
                    std::optional<int> classes = {}) {
    const TempDir dir;
    write_set(dir.path(), set);
    expect_error(ExitCode::bad_input, parts, [&] {
        load_dataset({dir.path().string(), {}, classes});
    });
}

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

TEST_CASE("data set: classes that occur only in the test labels count too", "[data][dataset]") {
    const TempDir dir;
    SetArrays arrays;
    arrays.test_labels = labels_of({0, 4, 1});
    write_set(dir.path(), arrays);
    CHECK(load(dir.path()).classes == 5);
    // This also holds for one of the two classes that every set must have.
    arrays.train_labels = labels_of({0, 0, 0, 0, 0, 0});
    arrays.test_labels = labels_of({0, 1, 0});
    write_set(dir.path(), arrays);
    CHECK(load(dir.path()).classes == 2);
}

TEST_CASE("data set: more classes than images, or than 65536, need to be confirmed",
          "[data][dataset]") {
    // One changed type byte makes float labels read as integers.
    constexpr std::int32_t one = 0x3F800000;
    SetArrays arrays;
    arrays.train_labels =
        array_of(IdxType::i32, {6}, std::vector<std::int32_t>{0, 0, one, 0, 0, 0});
    expect_bad_set(arrays, {train_labels_file, "byte offset 16 of the IDX data", "image 2",
                            "6 training images", "found 1065353216", "`classes` 1065353217"});
    arrays = {};
    arrays.train_labels = labels_of({0, 1, 2, 2, 1, 6});
    expect_bad_set(arrays, {train_labels_file, "byte offset 13", "found 6", "`classes` 7"});
    arrays = {};
    arrays.test_labels = labels_of({0, 6, 1});
    expect_bad_set(arrays, {test_labels_file, "byte offset 9", "6 training images", "`classes` 7"});

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
    expect_error(ExitCode::bad_input, {"image 65537", "at most 65536 classes", "`classes` 65537"},
                 [&] { load(dir.path()); });
    CHECK(load_dataset({dir.path().string(), {}, 65537}).classes == 65537);
}

TEST_CASE("data set: option classes", "[data][dataset]") {
    const TempDir dir;
    write_set(dir.path());
    CHECK(load_dataset({dir.path().string(), {}, 10}).classes == 10);
    CHECK(load_dataset({dir.path().string(), {}, 3}).classes == 3);
    for (const int classes : {1, 0, -1}) {
        expect_error(ExitCode::usage, {"`classes`", "expected 2 or more"}, [&] {
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

TEST_CASE("data set: a part of each class is held out for validation", "[data][dataset]") {
    const TempDir dir;
    SetArrays arrays;
    arrays.train_images = images_of({103, 4, 5});
    std::vector<std::uint8_t> labels(103);
    for (std::size_t i = 0; i < labels.size(); ++i) {
        labels[i] = static_cast<std::uint8_t>(i % 5 == 0 ? 0 : i % 3);
    }
    arrays.train_labels = labels_of(labels);
    write_set(dir.path(), arrays);
    const DataSpec whole{.path = dir.path().string()};
    const Dataset all = load_dataset(whole);
    CHECK(all.validation.count == 0);
    const auto images = [](const ImageSet& set, std::map<std::int32_t, std::int64_t>& classes) {
        REQUIRE(set.count == std::ssize(set.labels));
        REQUIRE(std::ssize(set.pixels) == set.count * 20);
        std::vector<std::string> found;
        for (std::size_t i = 0; i < set.labels.size(); ++i) {
            const auto at = set.pixels.begin() + 20 * i;
            found.push_back(std::string(at, at + 20) + std::to_string(set.labels[i]));
            ++classes[set.labels[i]];
        }
        return found;
    };
    std::map<std::int32_t, std::int64_t> of_all;
    const std::vector<std::string> every = images(all.train, of_all);
    for (const double part : {0.1, 0.25, 0.9}) {
        INFO(part);
        DataSpec spec = whole;
        spec.val_split = part;
        const Dataset set = load_dataset(spec);
        std::map<std::int32_t, std::int64_t> in_training, in_validation;
        const std::vector<std::string> kept = images(set.train, in_training);
        const std::vector<std::string> held = images(set.validation, in_validation);
        for (const auto& [label, count] : of_all) {
            CHECK(in_validation[label] ==
                  static_cast<std::int64_t>(static_cast<double>(count) * part));
            CHECK(in_training[label] + in_validation[label] == count);
        }
        // Both keep the order of the set, and together they are the set.
        auto next_kept = kept.begin(), next_held = held.begin();
        for (const std::string& image : every) {
            if (next_kept != kept.end() && *next_kept == image) {
                ++next_kept;
            } else {
                REQUIRE(next_held != held.end());
                CHECK(*next_held++ == image);
            }
        }
        CHECK(next_kept == kept.end());
        CHECK(next_held == held.end());
        CHECK(set.test.labels == all.test.labels);
    }
    DataSpec limited = whole;
    limited.limit = 40;
    limited.val_split = 0.5;
    const Dataset half = load_dataset(limited);
    CHECK(half.train.count + half.validation.count == 40);
    limited.limit = 8;
    limited.val_split = 0.01;
    expect_error(ExitCode::bad_input, {"`val-split` 0.01", "100 images"},
                 [&] { load_dataset(limited); });
}

TEST_CASE("data set: smaller classes are repeated until each has as many images as the largest",
          "[data][dataset]") {
    const TempDir dir;
    SetArrays arrays;
    arrays.train_images = images_of({12, 4, 5});  // all different
    arrays.train_labels = labels_of({2, 0, 0, 0, 0, 0, 0, 0, 2, 2, 1, 0});
    write_set(dir.path(), arrays);
    DataSpec spec{.path = dir.path().string()};
    const Dataset all = load_dataset(spec);
    spec.balanced = true;
    const Dataset balanced = load_dataset(spec);
    // The set as it is, then copies of the image of class 1, and of those of class 2 in turn.
    std::vector<std::size_t> from(12);
    std::iota(from.begin(), from.end(), std::size_t{0});
    from.insert(from.end(), {10, 10, 10, 10, 10, 10, 10, 0, 8, 9, 0, 8});
    REQUIRE(balanced.train.count == 24);
    REQUIRE(balanced.train.labels.size() == 24);
    REQUIRE(balanced.train.pixels.size() == 24 * 20);
    for (std::size_t i = 0; i < from.size(); ++i) {
        INFO(i);
        CHECK(balanced.train.labels[i] == all.train.labels[from[i]]);
        CHECK(std::equal(all.train.pixels.begin() + 20 * from[i],
                         all.train.pixels.begin() + 20 * (from[i] + 1),
                         balanced.train.pixels.begin() + 20 * i));
    }
    CHECK(balanced.test.labels == all.test.labels);
    // Images that are held out are not repeated, and no copy of them is in the training set.
    spec.val_split = 0.5;
    const Dataset split = load_dataset(spec);
    CHECK(split.validation.count == 5);  // 4 of 8, 0 of 1, 1 of 3
    CHECK(split.train.count == 3 * 4);
    for (std::int64_t held = 0; held < split.validation.count; ++held) {
        const auto* const image = split.validation.pixels.begin() + 20 * held;
        for (std::int64_t kept = 0; kept < split.train.count; ++kept) {
            CHECK(!std::equal(image, image + 20, split.train.pixels.begin() + 20 * kept));
        }
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
                    "2 classes", "found 2", "`classes` 3"},
                   2);
    arrays = {};
    arrays.test_labels = labels_of({0, 3, 0});
    expect_bad_set(arrays,
                   {test_labels_file, "byte offset 9 of the IDX data", "expected 0..2", "3 classes",
                    "found 3", "`classes` 4"},
                   3);
    arrays = {};
    arrays.test_labels = labels_of({0, 0, 0});
    arrays.train_labels = labels_of({0, 0, 0, 0, 0, 0});
    expect_bad_set(arrays, {train_labels_file, "at least 2 classes", "`classes`"});
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

TEST_CASE("data set: normalisation", "[data][dataset]") {
    ImageSet set;
    set.count = 2;
    set.channels = 2;
    set.height = 1;
    set.width = 2;
    // Channel 0: 0 255 255 0; channel 1: 51 throughout.
    set.pixels = std::vector<std::uint8_t>{0, 255, 51, 51, 255, 0, 51, 51};
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
    set.pixels = std::vector<std::uint8_t>(8, 253);
    CHECK(measure_normalisation(set).stddev.at(0) == 1.0F);

    // A channel in which one pixel differs is not constant: its deviation is that of {0 x 7, 1}.
    set.pixels = std::vector<std::uint8_t>{0, 0, 0, 0, 0, 0, 0, 1};
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
