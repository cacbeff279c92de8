// Data sets in tar files: with folders of classes, and with labels beside the pictures.
#include "data/tar.hpp"

#include <cstdlib>
#include <functional>

#include "data/dataset_files.hpp"
#include "tests/data/loading.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/temp_dir.hpp"

using namespace gyre;
using namespace gyre::data;
using namespace gyre::test;
namespace fs = std::filesystem;

namespace {

void write_file(const fs::path& path, const std::string& text) {
    write_bytes(path, Bytes(text.begin(), text.end()));
}

std::string text_of(const fs::path& path) {
    std::ifstream file(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
}

// Packs `what`, names in the folder, into a tar file.
void pack(const fs::path& folder, const std::string& what, const fs::path& file,
          const std::string& flags = "") {
    fs::create_directories(file.parent_path());
    const std::string command = "tar --sort=name " + flags + " -C '" + folder.string() + "' -cf '" +
                                file.string() + "' " + what;
    INFO(command);
    REQUIRE(std::system(command.c_str()) == 0);
}

std::vector<std::string> members(const fs::path& file) {
    std::vector<std::string> found;
    const std::string all = text_of(file);
    visit_tar(file, [&](const TarMember& member) {
        found.push_back(member.name + ":" + std::string(member.bytes) +
                        (member.is_link ? " (link)" : ""));
        CHECK(all.substr(member.offset, member.bytes.size()) == member.bytes);
    });
    return found;
}

// False, and says so, if the test cannot run here.
bool has_libarchive() {
    if (!tar_available()) {
        WARN("skipped: libarchive is not installed here");
    }
    return tar_available();
}

}  // namespace

TEST_CASE("the members of tar files of all kinds", "[data][formats]") {
    if (!has_libarchive()) {
        return;
    }
    const TempDir dir;
    const fs::path folder = dir.path() / "f", file = dir.path() / "f.tar";
    write_file(folder / "a.txt", "text of a");
    write_file(folder / "b/empty", "");
    write_file(folder / "b/large", std::string(100000, 'x'));
    fs::create_symlink("a.txt", folder / "link");
    for (const std::string format : {"gnu", "pax", "ustar", "v7"}) {
        INFO(format);
        const bool old = format == "ustar" || format == "v7";
        const std::string name(old ? 90 : 180, 'n'), umlaut = "\xc3\xa4.txt";
        write_file(folder / name, "long");
        write_file(folder / umlaut, "a");
        pack(folder, ".", file, "--format=" + format);
        CHECK(members(file) ==
              Names{"./a.txt:text of a", "./b/empty:", "./b/large:" + std::string(100000, 'x'),
                    "./link: (link)", "./" + name + ":long", "./" + umlaut + ":a"});
        fs::remove(folder / name);
    }
    const std::string all = text_of(file);
    const auto bad = [&](const std::string& text, std::initializer_list<std::string> parts) {
        write_file(file, text);
        expect_error(ExitCode::bad_input, parts, [&] { members(file); });
    };
    bad("", {"empty file"});
    bad("no tar file", {"damage"});
    bad(all.substr(0, 700), {"damage behind ./"});
    bad(all.substr(0, all.find("xxx") + 5000), {"b/large"});
    bad(all.substr(0, 1028), {"./a.txt", "cut off here"});
    bad(all.substr(0, 1536), {"cut off behind ./a.txt"});
    bad("\x1f\x8b" + all, {"compressed", "gunzip"});
    bad(all.substr(0, 512) + std::string(512, 'y') + std::string(5000, 'z'), {"damage"});
    expect_error(ExitCode::bad_input, {"none.tar", "No such file"},
                 [&] { members(dir.path() / "none.tar"); });
    write_bytes(folder / "holes", Bytes(1, 1));
    fs::resize_file(folder / "holes", 1 << 20);
    pack(folder, "holes", file, "--sparse");
    expect_error(ExitCode::bad_input, {file.string(), "holes"}, [&] { members(file); });
}

#if GYRE_HAVE_PNG
namespace {

// Two classes, of pictures whose first pixel tells them apart.
void write_pets(const fs::path& dir) {
    write_png(dir / "train/owl/b.png", 1, 2, 3, counted(6, 10));
    write_png(dir / "train/owl/a-b.png", 1, 2, 3, counted(6, 60));
    write_png(dir / "train/owl/a/b.png", 1, 2, 3, counted(6, 20));
    write_png(dir / "train/elk/z.png", 1, 2, 3, counted(6, 30));
    write_png(dir / "test/owl/1.png", 1, 2, 3, counted(6, 40));
    write_png(dir / "test/elk/deeper/2.png", 1, 2, 3, counted(6, 50));
    write_file(dir / "train/owl/notes.txt", "x");
    write_file(dir / "train/owl/.hidden.png", "x");
}

Dataset load(const fs::path& dir, std::optional<int> classes = {}) {
    return load_dataset({.path = dir.string(), .classes = classes});
}

void check_same(const Dataset& a, const Dataset& b) {
    CHECK(a.class_names == b.class_names);
    for (const auto part : {&Dataset::train, &Dataset::test, &Dataset::validation}) {
        CHECK((a.*part).labels == (b.*part).labels);
        CHECK(bytes_of((a.*part).pixels) == bytes_of((b.*part).pixels));
    }
}

}  // namespace

TEST_CASE("tar files of folders are the same set as the folders", "[data][formats]") {
    if (!has_libarchive()) {
        return;
    }
    const CacheFolder cache;
    const TempDir dir;
    const fs::path pets = dir.path() / "pets";
    write_pets(pets);
    const auto packed = [&](const std::string& name,
                            const std::function<void(const fs::path&)>& make) {
        INFO(name);
        const fs::path place = dir.path() / name;
        make(place);
        const Dataset of_tar = load(place);
        CHECK(of_tar.name == name);
        CHECK(of_tar.train.images_path.ends_with(".tar"));
        CHECK(of_tar.train.pixels.mapped());
        check_same(of_tar, load(pets));
        CHECK(bytes_of(of_tar.train.pixels) ==
              joined({counted(6, 30), counted(6, 20), counted(6, 60), counted(6, 10)}));
    };
    packed("beside", [&](const fs::path& place) {
        pack(pets / "train", ".", place / "train.tar");
        pack(pets / "test", ".", place / "test.tar");
    });
    packed("whole", [&](const fs::path& place) {  // with the parts' own folders
        pack(pets, "train", place / "pets-train.tar");
        pack(pets, "test", place / "pets-test.tar");
    });
    packed("shards", [&](const fs::path& place) {  // in any order
        pack(pets / "train", "owl", place / "train/0.tar", "--exclude=a");
        pack(pets / "train", "owl/a elk", place / "train/1.tar");
        pack(pets / "test", "elk owl", place / "test/0.tar");
    });
    packed("named", [&](const fs::path& place) {  // the first word that names a part counts
        pack(pets / "train", ".", place / "train-val.tar");
        pack(pets / "test", ".", place / "my_test.val.tar");
    });
    packed("rooted", [&](const fs::path& place) {  // with paths from the root
        pack(pets / "train", "elk owl", place / "train.tar", "-P --transform=s,^,/,");
        pack(pets / "test", "elk owl", place / "test.tar", "-P --transform=s,^,/,");
    });
    packed("mixed", [&](const fs::path& place) {
        pack(pets / "train", ".", place / "train.tar");
        fs::copy(pets / "test", place / "val", fs::copy_options::recursive);
    });
    // Validation pictures, and what has changed.
    write_png(pets / "val/owl/3.png", 1, 2, 3, counted(6, 70));
    const fs::path place = dir.path() / "beside";
    pack(pets / "val", ".", place / "pets-validation-0.tar");
    check_same(load(place), load(pets));
    CHECK(load(place).validation.count == 1);
    write_png(pets / "val/owl/3.png", 1, 2, 3, counted(6, 80));
    pack(pets / "val", ".", place / "pets-validation-0.tar");
    CHECK(bytes_of(load(place).validation.pixels) == counted(6, 80));

    const auto bad = [&](std::initializer_list<std::string> parts) { expect_bad(place, parts); };
    const fs::path train = place / "train.tar";
    pack(pets / "val", ".", train);
    bad({(place / "test.tar" / "elk").string(), "not in the training set", "it has owl"});
    pack(pets / "train/owl", ".", train);
    bad({(train / "a-b.png").string(), "no class", "a-b.cls"});
    fs::create_hard_link(pets / "train/owl/b.png", pets / "train/owl/c.png");
    pack(pets / "train", ".", train);
    bad({(train / "owl/c.png").string(), "link", "hard-dereference"});
    fs::remove(pets / "train/owl/c.png");
    write_file(pets / "train/owl/c.gif", "GIF89a");
    pack(pets / "train", ".", train);
    bad({(train / "owl/c.gif").string(), "only PNG"});
    fs::remove(pets / "train/owl/c.gif");
    write_file(pets / "train/owl/c.png", "\x89PNG");
    pack(pets / "train", ".", train);
    bad({(train / "owl/c.png").string(), "PNG", "damage"});
    pack(pets, "test/owl/../../train/owl/notes.txt", train);
    bad({train.string(), "no pictures"});
}

TEST_CASE("tar files with labels beside the pictures, as WebDataset has them", "[data][formats]") {
    if (!has_libarchive()) {
        return;
    }
    const CacheFolder cache;
    const TempDir dir;
    const fs::path place = dir.path() / "web", files = dir.path() / "files";
    const auto sample = [&](const std::string& key, int first, const std::string& label) {
        write_png(files / (key + ".png"), 1, 2, 3, counted(6, first));
        if (!label.empty()) {
            write_file(files / (key + ".cls"), label);
        }
        write_file(files / (key + ".json"), "{}");
    };
    const auto shard = [&](const std::string& name) {
        pack(files, ".", place / name);
        fs::remove_all(files);
    };
    sample("0002", 10, "1");
    sample("0001", 20, "0\n");
    shard("web-train-000000.tar");
    sample("more/0001", 30, "2");
    shard("web-train-000001.tar");
    sample("0001.x", 0, "");
    fs::remove_all(files);
    sample("a", 40, "0");
    shard("web-test-000000.tar");
    const Dataset set = load(place);
    CHECK(set.class_names.empty());
    CHECK(set.classes == 3);
    CHECK(set.train.labels == Labels{0, 1, 2});
    CHECK(bytes_of(set.train.pixels) == joined({counted(6, 20), counted(6, 10), counted(6, 30)}));
    CHECK(set.test.labels == Labels{0});
    CHECK(load(place, 5).classes == 5);

    const auto bad = [&](const std::string& key, int first, const std::string& label,
                         std::initializer_list<std::string> parts,
                         std::optional<int> classes = {}) {
        sample("0", 1, "0");
        sample(key, first, label);
        shard("web-train-000001.tar");
        expect_bad(place, parts, {.classes = classes});
    };
    const std::string last = (place / "web-train-000001.tar" / "9").string();
    bad("9", 0, "", {last + ".png", "no label", "9.cls"});
    bad("9", 0, "owl", {last + ".cls", "the number of a class", "'owl'"});
    bad("9", 0, "-1", {last + ".cls", "'-1'"});
    bad("9", 0, "1 2", {last + ".cls", "'1 2'"});
    bad("9", 0, "4",
        {last + ".cls", "expected 0..3 because there are 4 training images", "found 4"});
    bad("9", 0, "2", {last + ".cls", "expected 0..1", "2 classes", "found 2"}, 2);
    sample("0", 1, "0");
    write_file(files / "9.cls", "1");
    shard("web-train-000001.tar");
    expect_bad(place, {last + ".cls", "without a picture"});
    write_png(files / "9.seg.png", 1, 2, 3, counted(6));
    sample("9", 0, "1");
    shard("web-train-000001.tar");
    expect_bad(place, {last, "one picture for each"});
    // Both parts are packed alike.
    write_png(files / "elk/1.png", 1, 2, 3, counted(6));
    shard("web-test-000000.tar");
    sample("9", 0, "1");
    shard("web-train-000001.tar");
    expect_bad(place, {"web-test-000000.tar", "numbers instead of names"});
    write_png(files / "elk/1.png", 1, 2, 3, counted(6));
    shard("web-train-000000.tar");
    write_png(files / "elk/2.png", 1, 2, 3, counted(6));
    shard("web-train-000001.tar");
    sample("9", 0, "0");
    shard("web-test-000000.tar");
    expect_bad(place, {"web-test-000000.tar", "its classes are numbers", "elk"});
}
#endif
