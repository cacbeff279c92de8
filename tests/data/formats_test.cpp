// Data sets in NumPy and CIFAR files.
#include <sys/wait.h>
#include <unistd.h>

#include <functional>

#include "data/dataset_files.hpp"
#include "tests/data/loading.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/small_dataset.hpp"
#include "tests/support/temp_dir.hpp"

using namespace gyre;
using namespace gyre::data;
using namespace gyre::test;
namespace fs = std::filesystem;

namespace {

void write_npy(const fs::path& path, const std::string& type, const std::string& shape,
               const Bytes& elems, int version = 1, const std::string& order = "False") {
    std::string header =
        "{'descr': '" + type + "', 'fortran_order': " + order + ", 'shape': " + shape + ", }";
    while ((header.size() + (version == 1 ? 11 : 13)) % 64 != 0) {
        header += ' ';
    }
    header += '\n';
    Bytes bytes = {0x93, 'N', 'U', 'M', 'P', 'Y', static_cast<std::uint8_t>(version), 0};
    for (int i = 0; i < (version == 1 ? 2 : 4); ++i) {
        bytes.push_back(static_cast<std::uint8_t>(header.size() >> (8 * i)));
    }
    bytes.insert(bytes.end(), header.begin(), header.end());
    bytes.insert(bytes.end(), elems.begin(), elems.end());
    write_bytes(path, bytes);
}

// Writes 4 training and 2 test images of 2 x 3 pixels with 3 channels.
void write_npy_set(const fs::path& dir, const std::string& images, const std::string& labels,
                   const std::string& second = "test") {
    const bool keras = second != "test";
    const auto name = [&](const std::string& what, const std::string& set) {
        return dir / (keras ? what + "_" + set + ".npy" : set + "_" + what + ".npy");
    };
    write_npy(name(images, "train"), "|u1", "(4, 2, 3, 3)", counted(72));
    write_npy(name(labels, "train"), "|u1", "(4,)", {0, 1, 2, 1});
    write_npy(name(images, "test"), "|u1", "(2, 2, 3, 3)", counted(36, 100));
    write_npy(name(labels, "test"), "<i4", "(2, 1)", {2, 0, 0, 0, 1, 0, 0, 0});
}

}  // namespace

TEST_CASE("npy: both spellings, channels last, labels of any integer type", "[data][formats]") {
    for (const bool keras : {false, true}) {
        const TempDir dir;
        if (keras) {
            write_npy_set(dir.path(), "x", "y", "keras");
        } else {
            write_npy_set(dir.path(), "images", "labels");
        }
        const Dataset set = load(dir.path());
        CHECK(set.train.count == 4);
        CHECK(set.train.channels == 3);
        CHECK(set.train.height == 2);
        CHECK(set.train.width == 3);
        CHECK(set.train.labels == Labels{0, 1, 2, 1});
        CHECK(set.test.labels == Labels{2, 1});
        CHECK(set.classes == 3);
        CHECK(set.class_names.empty());
        // [H][W][C] has become [C][H][W].
        CHECK(bytes_of(set.train.pixels).at(1) == 3);
        CHECK(bytes_of(set.train.pixels).at(6) == 1);
        CHECK(bytes_of(set.test.pixels).at(18 + 12) == 100 + 18 + 2);
    }
}

TEST_CASE("npy: images of one channel are mapped", "[data][formats]") {
    for (const int version : {1, 2, 3}) {
        const TempDir dir;
        write_npy_set(dir.path(), "images", "labels");
        write_npy(dir.path() / "train_images.npy", "|u1", "(4, 2, 3)", counted(24), version);
        write_npy(dir.path() / "test_images.npy", "|u1", "(2, 2, 3, 1)", counted(12, 50), version);
        const Dataset set = load(dir.path());
        CHECK(set.train.pixels.mapped());
        CHECK(set.train.channels == 1);
        CHECK(bytes_of(set.train.pixels) == counted(24));
        CHECK(bytes_of(set.test.pixels) == counted(12, 50));
        const Dataset two = load_dataset({dir.path().string(), 2, {}});
        CHECK(bytes_of(two.train.pixels) == counted(12));
    }
}

TEST_CASE("a mapped file that is truncated ends the process, with its name", "[data][formats]") {
    const TempDir dir;
    write_npy_set(dir.path(), "images", "labels");
    const fs::path images = dir.path() / "train_images.npy";
    write_npy(images, "|u1", "(4, 200, 300)", counted(240000));
    write_npy(dir.path() / "test_images.npy", "|u1", "(2, 200, 300)", counted(120000));
    int text[2];
    REQUIRE(pipe(text) == 0);
    const pid_t child = fork();
    REQUIRE(child >= 0);
    if (child == 0) {
        dup2(text[1], STDERR_FILENO);
        const Dataset set = load(dir.path());
        fs::resize_file(images, 20);
        _exit(set.train.pixels.at(200000) == 0 ? 100 : 101);
    }
    close(text[1]);
    std::string said;
    for (std::array<char, 1000> some{}; true;) {
        const ssize_t bytes = read(text[0], some.data(), some.size());
        if (bytes <= 0) {
            break;
        }
        said.append(some.data(), static_cast<std::size_t>(bytes));
    }
    close(text[0]);
    int status = 0;
    REQUIRE(waitpid(child, &status, 0) == child);
    INFO(said);
    REQUIRE(WIFEXITED(status));
    CHECK(WEXITSTATUS(status) == static_cast<int>(ExitCode::bad_input));
    CHECK(said.starts_with("gyre: " + images.string() + ": the file was truncated"));
}

TEST_CASE("npy: errors name the cause", "[data][formats]") {
    const TempDir dir;
    const fs::path images = dir.path() / "train_images.npy",
                   labels = dir.path() / "train_labels.npy";
    const auto bad = [&](const fs::path& path, const std::string& type, const std::string& shape,
                         int elems_bytes, std::initializer_list<std::string> parts,
                         const std::string& order = "False") {
        write_npy_set(dir.path(), "images", "labels");
        write_npy(path, type, shape, Bytes(static_cast<std::size_t>(elems_bytes)), 1, order);
        INFO(type << " " << shape);
        expect_bad(dir.path(), parts);
    };
    bad(images, "<f4", "(4, 2, 3, 3)", 288, {images.string(), "f4", "astype(numpy.uint8)"});
    bad(images, "|u1", "(4, 3, 8, 8)", 768, {images.string(), "transpose(0, 2, 3, 1)"});
    bad(images, "|u1", "(24,)", 24, {images.string(), "[N][H][W]", "24"});
    bad(images, "|u1", "(0, 2, 3)", 0, {images.string(), "0x2x3"});
    bad(images, "|u1", "(4, 2, 3, 3)", 71, {images.string(), "72 bytes", "71", "truncated"});
    bad(images, "|u1", "(4, 2, 3, 3)", 73, {images.string(), "damaged"});
    bad(images, "|u1", "(3, 2, 3, 3)", 54, {images.string(), labels.string(), "3 images, but"});
    bad(images, "|u1", "(4, 2, 3, 3)", 72, {images.string(), "ascontiguousarray"}, "True");
    bad(images, "|u1", "(4, 3, 2, 3)", 72, {"differ in shape", images.string()});
    bad(images, "|u1", "4, 3", 72, {images.string(), "'shape'"});
    bad(labels, ">i4", "(4,)", 16, {labels.string(), "astype"});
    bad(labels, "<f8", "(4,)", 32, {labels.string(), "f8", "astype(numpy.int64)"});
    bad(labels, "|u1", "(4, 3)", 12, {labels.string(), "argmax"});
    bad(labels, "|O", "(4,)", 4, {labels.string(), "integer"});

    write_npy_set(dir.path(), "images", "labels");
    write_npy(labels, "|i1", "(4,)", {0, 1, 255, 1});
    expect_bad(dir.path(), {labels.string(), "image 2", "found -1"});
    write_npy(labels, "|i1", "(4,)", {0, 1, 9, 1});
    expect_bad(dir.path(), {labels.string(), "image 2", "4 training images", "`classes` 10"});
    CHECK(load_dataset({dir.path().string(), {}, 10}).classes == 10);
    write_bytes(labels, {'x', 'y'});
    expect_bad(dir.path(), {labels.string(), "numpy.save"});
    fs::remove(labels);
    expect_bad(dir.path(), {labels.string(), "no such file"});
}

// ---- CIFAR ----

namespace {

// Makes records with the labels 0, 1, ... (in CIFAR-100 after a coarse one).
Bytes cifar_records(int count, int classes, int first) {
    Bytes bytes;
    for (int i = 0; i < count; ++i) {
        if (classes == 100) {
            bytes.push_back(7);
        }
        bytes.push_back(static_cast<std::uint8_t>((first + i) % classes));
        const Bytes image = counted(3072, first + i);
        bytes.insert(bytes.end(), image.begin(), image.end());
    }
    return bytes;
}

void write_cifar10(const fs::path& dir) {
    for (int batch = 1; batch <= 5; ++batch) {
        write_bytes(dir / ("data_batch_" + std::to_string(batch) + ".bin"),
                    cifar_records(2, 10, 2 * (batch - 1)));
    }
    write_bytes(dir / "test_batch.bin", cifar_records(3, 10, 0));
    write_text(dir / "batches.meta.txt",
               "airplane\nautomobile\nbird\ncat\ndeer\ndog\nfrog\nhorse\nship\ntruck\n\n");
}

}  // namespace

TEST_CASE("CIFAR-10 and CIFAR-100, in the folder or its archive's subfolder", "[data][formats]") {
    for (const std::string inside : {"", "cifar-10-batches-bin"}) {
        const TempDir dir;
        write_cifar10(dir.path() / "mine" / inside);
        const Dataset set = load(dir.path() / "mine");
        CHECK(set.name == "mine");
        CHECK(set.train.count == 10);
        CHECK(set.train.labels == Labels{0, 1, 2, 3, 4, 5, 6, 7, 8, 9});
        CHECK(set.test.labels == Labels{0, 1, 2});
        CHECK(set.train.channels == 3);
        CHECK(set.train.height == 32);
        CHECK(set.train.width == 32);
        CHECK(set.classes == 10);
        CHECK(set.class_names.at(9) == "truck");
        CHECK(bytes_of(set.train.pixels.part(9 * 3072, 3072)) == counted(3072, 9));
        expect_bad(dir.path() / "mine", {"10 classes", "`classes` says 7"}, {"", {}, 7});
    }
    const TempDir dir;
    const fs::path home = dir.path() / "cifar-100-binary";
    write_bytes(home / "train.bin", cifar_records(4, 100, 96));
    write_bytes(home / "test.bin", cifar_records(2, 100, 0));
    const Dataset set = load(dir.path());
    CHECK(set.train.labels == Labels{96, 97, 98, 99});  // the fine labels
    CHECK(set.classes == 100);
    CHECK(set.class_names.empty());
    CHECK(bytes_of(set.test.pixels.part(3072, 3072)) == counted(3072, 1));
}

TEST_CASE("CIFAR: errors name the cause", "[data][formats]") {
    const TempDir dir;
    const fs::path batch = dir.path() / "data_batch_3.bin";
    const auto bad = [&](const Bytes& bytes, std::initializer_list<std::string> parts) {
        write_cifar10(dir.path());
        write_bytes(batch, bytes);
        expect_bad(dir.path(), parts);
    };
    bad(Bytes(3072), {batch.string(), "3073", "found 3072 bytes", "download"});
    bad({}, {batch.string(), "found 0 bytes"});
    Bytes records = cifar_records(2, 10, 0);
    records[3073] = 10;
    bad(records, {batch.string(), "byte offset 3073", "0..9, found 10"});
    fs::remove(batch);
    expect_bad(dir.path(), {batch.string(), "no such file"});

    const TempDir python;
    fs::create_directories(python.path() / "cifar-10-batches-py");
    expect_bad(python.path(), {"cifar-10-batches-py", "cifar-10-binary.tar.gz"});
}

// ---- Pictures ----
