// Data sets in folders of pictures, their cache, and the sizes that images are brought to.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdlib>
#include <functional>
#include <thread>

#include "data/dataset_files.hpp"
#include "data/image_cache.hpp"
#include "data/picture.hpp"
#include "data/resize.hpp"
#include "tests/data/loading.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/small_dataset.hpp"
#include "tests/support/temp_dir.hpp"

using namespace gyre;
using namespace gyre::data;
using namespace gyre::test;
namespace fs = std::filesystem;

TEST_CASE("resizing averages, interpolates, and keeps constant images", "[data][formats]") {
    const Bytes four = {0, 100, 200, 100};
    CHECK(resize_image(four.data(), 1, 2, 2, {1, 1}) == Bytes{100});
    CHECK(resize_image(four.data(), 1, 2, 2, {2, 2}) == four);
    // Pillow also gives a quarter and three quarters.
    const Bytes line = {0, 100};
    CHECK(resize_image(line.data(), 1, 1, 2, {1, 4}) == Bytes{0, 25, 75, 100});
    const Bytes steps = {0, 0, 0, 90, 90, 90};
    // The weights are 2, 3, 2 and 1 eighths.
    CHECK(resize_image(steps.data(), 1, 1, 6, {1, 2}) == Bytes{11, 79});
    for (const int channels : {1, 3}) {
        const Bytes plain(static_cast<std::size_t>(channels * 35), 77);
        CHECK(resize_image(plain.data(), channels, 5, 7, {9, 3}) ==
              Bytes(static_cast<std::size_t>(channels * 27), 77));
    }
    // Colours are resized separately on each axis, also if the other axis keeps its size.
    constexpr int kHeight = 5, kWidth = 7, kChannels = 3;
    Bytes colours, planes;  // [height][width][channels], [channels][height][width]
    for (int i = 0; i < kHeight * kWidth * kChannels; ++i) {
        colours.push_back(static_cast<std::uint8_t>(i * i * 37 % 251));
    }
    for (int i = 0; i < kHeight * kWidth * kChannels; ++i) {
        planes.push_back(colours[static_cast<std::size_t>(i % (kHeight * kWidth) * kChannels +
                                                          i / (kHeight * kWidth))]);
    }
    for (const Resize size : {Resize{3, 4}, Resize{9, 11}, Resize{kHeight, 4}, Resize{9, kWidth},
                              Resize{kHeight, kWidth}}) {
        INFO(size.height << " x " << size.width);
        const Bytes resized = resize_image(colours.data(), kChannels, kHeight, kWidth, size);
        const int area = size.height * size.width;
        ImageSet images;
        images.count = 1;
        images.channels = kChannels;
        images.height = kHeight;
        images.width = kWidth;
        images.pixels = planes;
        resize_images(images, size);
        CHECK(images.height == size.height);
        CHECK(images.width == size.width);
        REQUIRE(images.pixels.size() == resized.size());
        for (int c = 0; c < kChannels; ++c) {
            const Bytes plane =
                resize_image(planes.data() + c * kHeight * kWidth, 1, kHeight, kWidth, size);
            for (int i = 0; i < area; ++i) {
                const auto at = static_cast<std::size_t>(i);
                CHECK(resized[at * kChannels + static_cast<std::size_t>(c)] == plane[at]);
                CHECK(images.pixels.at(static_cast<std::size_t>(c * area) + at) == plane[at]);
            }
        }
    }
    const TempDir dir;
    write_set(dir.path());
    const Dataset set = load_dataset({dir.path().string(), {}, {}, Resize{2, 10}});
    CHECK(set.train.height == 2);
    CHECK(set.test.width == 10);
    CHECK(set.train.pixels.size() == 6 * 20);
}

TEST_CASE("the middle of an image whose shorter side is resized", "[data][formats]") {
    Bytes pixels;
    for (int i = 0; i < 13 * 29 * 3; ++i) {
        pixels.push_back(static_cast<std::uint8_t>(i * i * 37 % 251));
    }
    // Half of the rest is left out above and on the left; halves become even, as in Python.
    struct Case {
        int height, width;
        Resize to;
        int whole_height, whole_width, above, left;
    };
    for (const Case& c : {Case{13, 29, {9, 9, 9}, 9, 20, 0, 6},
                          {13, 29, {6, 5, 9}, 9, 20, 2, 8},
                          {29, 13, {8, 7, 10}, 22, 10, 7, 2},
                          {29, 13, {13, 12, 13}, 29, 13, 8, 0},
                          {13, 29, {20, 30, 31}, 31, 69, 6, 20}}) {
        INFO(resize_text(c.to) << " of " << c.height << " x " << c.width);
        const Bytes whole =
            resize_image(pixels.data(), 3, c.height, c.width, {c.whole_height, c.whole_width});
        Bytes middle;
        for (int y = 0; y < c.to.height; ++y) {
            const auto first = whole.begin() + ((c.above + y) * c.whole_width + c.left) * 3;
            middle.insert(middle.end(), first, first + c.to.width * 3);
        }
        CHECK(resize_image(pixels.data(), 3, c.height, c.width, c.to) == middle);
    }
    // An image so long that it must not be resized as a whole.
    const Bytes line(1 << 22, 9);
    CHECK(resize_image(line.data(), 1, 1, 1 << 22, {200, 224, 256}) == Bytes(200 * 224, 9));
    const TempDir dir;
    write_set(dir.path());
    CHECK(load_dataset({dir.path().string(), {}, {}, Resize{2, 3, 5}}).train.pixels.size() ==
          6 * 6);
}

TEST_CASE("sizes are read as they are written", "[data][formats]") {
    for (const char* text : {"64x48", "256,centercrop224", "256,centercrop224x160"}) {
        Resize to;
        CHECK(read_resize(text, to).empty());
        CHECK(resize_text(to) == text);
    }
    for (const char* text : {"", "64", "64x", "64x48x", "0x4", "16385x4", "256,", "256,centercrop",
                             "256,centercrop224x", "256,centercrop224,", "centercrop224",
                             "0,centercrop0", "-1x4", "256,centercrop257", "8,centercrop4x9"}) {
        Resize to{1, 2, 3};
        CHECK(read_resize(text, to).find(text) != std::string::npos);
        CHECK(resize_text(to) == "3,centercrop1x2");
    }
}

#if GYRE_HAVE_PNG && GYRE_HAVE_JPEG

namespace {

// Writes two classes of grey pictures of 2 x 3 pixels, three for training and two for testing.
void write_pictures(const fs::path& dir, const std::string& test = "test") {
    fs::remove_all(dir / "train");
    fs::remove_all(dir / test);
    write_png(dir / "train/owl/b.png", 1, 2, 3, counted(6, 10));
    write_png(dir / "train/owl/a.PNG", 1, 2, 3, counted(6, 20));
    write_png(dir / "train/elk/z.png", 1, 2, 3, counted(6, 30));
    write_png(dir / test / "owl/1.png", 1, 2, 3, counted(6, 40));
    write_png(dir / test / "elk/deeper/2.png", 1, 2, 3, counted(6, 50));
    write_text(dir / "train/owl/notes.txt", "x");
    write_text(dir / "train/owl/.hidden.png", "x");
}

}  // namespace

TEST_CASE("pictures: classes, order, and a cache that is mapped", "[data][formats]") {
    const CacheFolder cache;
    for (const std::string test : {"test", "val"}) {
        const TempDir dir;
        write_pictures(dir.path() / "zoo", test);
        for (int time = 0; time < 2; ++time) {
            const Dataset set = load(dir.path() / "zoo");
            CHECK(set.name == "zoo");
            CHECK(set.class_names == Names{"elk", "owl"});
            CHECK(set.classes == 2);
            CHECK(set.train.labels == Labels{0, 1, 1});
            CHECK(set.test.labels == Labels{0, 1});
            CHECK(set.train.channels == 1);
            CHECK(set.train.height == 2);
            CHECK(set.train.width == 3);
            CHECK(bytes_of(set.train.pixels) ==
                  joined({counted(6, 30), counted(6, 20), counted(6, 10)}));
            CHECK(bytes_of(set.test.pixels) == joined({counted(6, 50), counted(6, 40)}));
            CHECK(set.train.pixels.mapped());
        }
    }
}

TEST_CASE("pictures: a folder val beside test is for validation", "[data][formats]") {
    const CacheFolder cache;
    const TempDir dir;
    write_pictures(dir.path());
    write_png(dir.path() / "val/owl/v.png", 1, 2, 3, counted(6, 60));
    write_png(dir.path() / "val/elk/w.png", 1, 2, 3, counted(6, 70));
    write_png(dir.path() / "val/elk/x.png", 1, 2, 3, counted(6, 80));
    for (int time = 0; time < 2; ++time) {
        const Dataset set = load(dir.path());
        CHECK(set.train.count == 3);
        CHECK(bytes_of(set.test.pixels) == joined({counted(6, 50), counted(6, 40)}));
        CHECK(set.validation.count == 3);
        CHECK(set.validation.labels == Labels{0, 0, 1});
        CHECK(bytes_of(set.validation.pixels) ==
              joined({counted(6, 70), counted(6, 80), counted(6, 60)}));
        CHECK(set.validation.height == 2);
        CHECK(set.validation.width == 3);
        CHECK(set.validation.images_path == (dir.path() / "val").string());
    }
    DataSpec both{dir.path().string()};
    both.val_split = 0.5;
    expect_error(ExitCode::usage, {"`val-split` 0.5", "has validation images already"},
                 [&] { load_dataset(both); });
    write_png(dir.path() / "val/newt/y.png", 1, 2, 3, counted(6, 90));
    expect_error(ExitCode::bad_input, {"val/newt", "not in the training set"},
                 [&] { load(dir.path()); });
}

TEST_CASE("pictures: the cache follows the files", "[data][formats]") {
    const CacheFolder cache;
    const TempDir dir;
    write_pictures(dir.path());
    load(dir.path());
    REQUIRE(cache.images().size() == 1);
    CHECK(cache.files() == 2);  // with the lock
    const auto written = fs::last_write_time(cache.images()[0]);
    load(dir.path());
    CHECK(fs::last_write_time(cache.images()[0]) == written);

    // Other bytes in a file, one file fewer, another time: all decode again, into the same file.
    write_png(dir.path() / "train/elk/z.png", 1, 2, 3, counted(6, 130));
    CHECK(load(dir.path()).train.pixels.at(0) == 130);
    fs::remove(dir.path() / "train/owl/b.png");
    CHECK(load(dir.path()).train.count == 2);
    CHECK(cache.images().size() == 1);
    const Dataset wide = load_dataset({dir.path().string(), {}, {}, Resize{2, 6}});
    CHECK(wide.train.width == 6);
    CHECK(cache.images().size() == 2);

    // A damaged file is replaced, and files left by a killed process are removed.
    for (const fs::path& file : cache.images()) {
        fs::resize_file(file, 4099);
        write_text(file.string() + ".new-killed", "x");
    }
    CHECK(load(dir.path()).train.pixels.at(0) == 130);
    CHECK(load_dataset({dir.path().string(), {}, {}, Resize{2, 6}}).train.width == 6);
    CHECK(cache.files() == 4);
}

TEST_CASE("pictures: damage anywhere in the cache is noticed", "[data][formats]") {
    const CacheFolder cache;
    const TempDir dir;
    write_pictures(dir.path());
    const Bytes right = bytes_of(load(dir.path()).train.pixels);
    const fs::path file = cache.images().at(0);
    const std::string intact = file_bytes(file);
    int remarks = 0;
    const auto check = [&](const std::string& damaged) {
        write_text(file, damaged);
        const Dataset set = load_dataset({dir.path().string()}, [&](const std::string& text) {
            CHECK(text == file.string() + ": this file is damaged; the pictures are decoded again");
            ++remarks;
        });
        CHECK(set.train.height == 2);
        CHECK(set.train.width == 3);
        CHECK(bytes_of(set.train.pixels) == right);
        CHECK(file_bytes(file) == intact);
    };
    const auto flip = [&](std::size_t at) {
        INFO("byte " << at);
        std::string damaged = intact;
        damaged[at] = static_cast<char>(damaged[at] ^ 1);
        check(damaged);
    };
    constexpr std::size_t kHeader = 56, kPixels = 4096;
    for (std::size_t at = 0; at < kHeader; ++at) {
        flip(at);
    }
    CHECK(remarks == 56 - 16 - 8);  // another format or key is not damage
    for (std::size_t at = kPixels; at < intact.size(); ++at) {
        flip(at);
    }
    check(intact.substr(0, intact.size() - 1));
    check(intact.substr(0, kPixels));
    check(intact + "x");
    check(intact.substr(0, kPixels) + std::string(intact.size() - kPixels, '\0'));
}

TEST_CASE("pictures: a cache that cannot be written is only reported", "[data][formats]") {
    CacheFolder cache;
    const TempDir dir;
    write_pictures(dir.path());
    write_text(dir.path() / "file", "x");
    cache.use(dir.path() / "file");
    std::vector<std::string> told;
    const auto tell = [&](const std::string& text) { told.push_back(text); };
    const Dataset set = load_dataset({dir.path().string()}, tell);
    CHECK(set.train.pixels.at(0) == 30);
    CHECK(!set.train.pixels.mapped());
    REQUIRE(told.size() == 1);
    CHECK(told[0].find("XDG_CACHE_HOME") != std::string::npos);
}

TEST_CASE("pictures: loads at the same time get the same images", "[data][formats]") {
    const CacheFolder cache;
    const TempDir dir;
    write_pictures(dir.path());
    std::vector<Dataset> sets(4);
    std::vector<std::thread> threads;
    for (Dataset& set : sets) {
        threads.emplace_back([&] { set = load(dir.path()); });
    }
    for (std::thread& thread : threads) {
        thread.join();
    }
    for (const Dataset& set : sets) {
        CHECK(bytes_of(set.train.pixels) == bytes_of(sets[0].train.pixels));
        CHECK(set.train.pixels.size() == 18);
    }
    CHECK(cache.files() == 2);
}

TEST_CASE("pictures: if one is in colour, all have three channels", "[data][formats]") {
    const CacheFolder cache;
    const TempDir dir;
    write_pictures(dir.path());
    write_png(dir.path() / "test/owl/colour.png", 3, 2, 3, counted(18));
    write_png(dir.path() / "test/owl/alpha.png", 4, 2, 3, joined({counted(20), Bytes(4, 255)}));
    write_jpeg(dir.path() / "train/owl/c.jpg", 3, 2, 3, 90);
    write_jpeg(dir.path() / "train/owl/d.jpeg", 1, 2, 3, 80);
    const Dataset set = load(dir.path());
    CHECK(set.train.channels == 3);
    const Bytes elk = counted(6, 30);
    CHECK(bytes_of(set.train.pixels.part(0, 18)) == joined({elk, elk, elk}));
    CHECK(bytes_of(set.train.pixels.part(3 * 18, 36)) == joined({Bytes(18, 90), Bytes(18, 80)}));
    // test/owl: 1.png, alpha.png, colour.png
    CHECK(bytes_of(set.test.pixels.part(3 * 18, 18)) ==
          Bytes{0, 3, 6, 9, 12, 15, 1, 4, 7, 10, 13, 16, 2, 5, 8, 11, 14, 17});
    CHECK(set.test.pixels.at(2 * 18 + 1) == 4);  // 4 bytes per pixel in the file
}

TEST_CASE("pictures: CMYK becomes RGB as PIL converts it", "[data][formats]") {
    const TempDir dir;
    const fs::path path = dir.path() / "inks.jpg";
    for (const int value : {0, 7, 80, 200, 255}) {
        write_jpeg(path, 4, 2, 3, static_cast<std::uint8_t>(value));
        const Picture picture = decode_picture({path}, false);
        CHECK(picture.channels == 3);
        const long expected = value - std::lround((255 - value) * value / 255.0);
        CHECK(picture.pixels == Bytes(18, static_cast<std::uint8_t>(std::max(0L, expected))));
    }
    // PIL 13.0's Image.open(path).convert("RGB") of this file.
    const Bytes inks = {10, 60, 110, 200}, colours = {8, 47, 86};
    write_jpeg(path, 1, 1, inks);
    CHECK(decode_picture({path}, true).pixels == colours);
    // Through YCCK each of the two conversions rounds.
    write_jpeg(path, 1, 1, inks, true);
    const Bytes found = decode_picture({path}, true).pixels;
    REQUIRE(found.size() == 3);
    for (std::size_t i = 0; i < 3; ++i) {
        CHECK(std::abs(int{found[i]} - int{colours[i]}) <= 2);
    }
}

#if GYRE_HAVE_WEBP
TEST_CASE("pictures: WebP", "[data][formats]") {
    const TempDir dir;
    const fs::path path = dir.path() / "a.webp";
    const Bytes pixels = counted(2 * 3 * 3, 40);
    write_webp(path, 2, 3, pixels);
    for (const bool colour : {false, true}) {
        const Picture picture = decode_picture({path}, colour);
        CHECK(picture.channels == 3);
        CHECK(picture.height == 2);
        CHECK(picture.width == 3);
        CHECK(picture.pixels == pixels);
    }
    const auto bytes = fs::file_size(path);
    for (std::uintmax_t kept = 12; kept < bytes; ++kept) {
        write_webp(path, 2, 3, pixels);
        fs::resize_file(path, kept);
        INFO(kept << " of " << bytes << " bytes");
        expect_error(ExitCode::bad_input, {path.string(), "WebP", "damage"},
                     [&] { decode_picture({path}, true); });
    }
}
#endif

TEST_CASE("pictures: bad ones are left out if so many may be", "[data][formats]") {
    CacheFolder cache;
    const TempDir dir;
    const auto zoo = dir.path() / "zoo";
    write_pictures(zoo);
    // The first of all, one amid the others, and the last; names are in this order.
    write_text(zoo / "train/elk/a.png", "x");
    write_text(zoo / "train/owl/c.png", "");
    write_text(zoo / "test/owl/zz.png", "x");
    std::vector<std::string> told;
    const auto load = [&](std::int64_t skip_bad) {
        DataSpec spec;
        spec.path = zoo.string();
        spec.skip_bad = skip_bad;
        told.clear();
        return load_dataset(spec, [&](const std::string& text) { told.push_back(text); });
    };
    for (const bool cached : {true, false}) {
        if (!cached) {
            cache.use(dir.path() / "zoo/train/elk/a.png");  // no folder: the images stay in memory
        }
        for (int time = 0; time < 2; ++time) {
            const Dataset set = load(3);
            CHECK(set.train.labels == Labels{0, 1, 1});
            CHECK(set.test.labels == Labels{0, 1});
            CHECK(bytes_of(set.train.pixels) ==
                  joined({counted(6, 30), counted(6, 20), counted(6, 10)}));
            CHECK(bytes_of(set.test.pixels) == joined({counted(6, 50), counted(6, 40)}));
            CHECK(set.train.pixels.mapped() == cached);
            REQUIRE(!told.empty());
            for (const char* part : {"zoo: 3 of 8 pictures", "elk/a.png", "c.png", "zz.png"}) {
                INFO(told.back());
                CHECK(told.back().find(part) != std::string::npos);
            }
        }
        expect_error(ExitCode::bad_input, {"3 pictures of 8", "`skip-bad` 2"}, [&] { load(2); });
        expect_error(ExitCode::bad_input, {"elk/a.png", "something else"}, [&] { load(0); });
    }
}

TEST_CASE("pictures: errors name the cause", "[data][formats]") {
    const CacheFolder cache;
    const TempDir dir;
    const fs::path owl = dir.path() / "train/owl";
    const auto bad = [&](const std::function<void()>& spoil,
                         std::initializer_list<std::string> parts) {
        write_pictures(dir.path());
        spoil();
        expect_bad(dir.path(), parts);
        CHECK(cache.images().empty());
    };
    const auto picture = owl / "b.png";
    bad([&] { fs::resize_file(picture, 60); },
        {picture.string(), "PNG", "damage", "copy the file"});
    bad([&] { write_text(picture, ""); }, {picture.string(), "empty file"});
    bad([&] { write_text(picture, "GIF89a"); }, {picture.string(), "something else", "convert"});
    bad(
        [&] {
            write_jpeg(owl / "q.jpg", 1, 32, 32, 7);
            fs::resize_file(owl / "q.jpg", fs::file_size(owl / "q.jpg") - 9);
        },
        {"q.jpg", "JPEG", "damage"});
    bad([&] { write_png(owl / "c.png", 1, 3, 3, counted(9)); },
        {"c.png", "3x3", "z.png", "2x3", "`resize`"});
    bad([&] { write_text(owl / "x.gif", "x"); }, {"x.gif", "PNG, JPEG and WebP"});
    bad([&] { fs::create_directories(dir.path() / "train/yak"); },
        {(dir.path() / "train/yak").string(), "has no pictures"});
    bad([&] { fs::create_directories(dir.path() / "test/yak"); },
        {(dir.path() / "test/yak").string(), "training set", "elk, owl"});
    bad([&] { fs::remove_all(dir.path() / "test"); }, {dir.path().string(), "test or val"});
    bad(
        [&] {
            fs::remove_all(dir.path() / "test");
            fs::create_directories(dir.path() / "test");
        },
        {(dir.path() / "test").string(), "no folders"});
    // The first of several bad files is reported, whichever thread meets it.
    for (int time = 0; time < 5; ++time) {
        bad(
            [&] {
                for (const char* name : {"c", "d", "e", "f"}) {
                    write_text(owl / (std::string(name) + ".png"), "x");
                }
            },
            {"c.png"});
    }
    // Resizing all to one size is the remedy.
    write_pictures(dir.path());
    write_png(owl / "c.png", 1, 3, 3, Bytes(9, 60));
    const Dataset set = load_dataset({dir.path().string(), {}, {}, Resize{4, 4}});
    CHECK(bytes_of(set.train.pixels.part(3 * 16, 16)) == Bytes(16, 60));
}

#endif

#if !GYRE_HAVE_PNG
TEST_CASE("pictures: a build without the library names the package", "[data][formats]") {
    const TempDir dir;
    const fs::path picture = dir.path() / "a.png";
    write_bytes(picture, {0x89, 'P', 'N', 'G', 0, 0, 0, 0});
    expect_error(ExitCode::bad_input, {picture.string(), "libpng-dev"},
                 [&] { decode_picture({picture}, false); });
}
#endif
