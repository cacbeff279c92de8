// Finding a data set: the names of its files, its folder, and the search path.
#include "data/dataset_files.hpp"

#include <zlib.h>

#include <cstdlib>
#include <fstream>
#include <optional>
#include <string>
#include <utility>

#include "tests/support/catch.hpp"
#include "tests/support/expect_error.hpp"
#include "tests/support/small_dataset.hpp"
#include "tests/support/temp_dir.hpp"

using namespace gyre;
using namespace gyre::data;
using namespace gyre::test;
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

void compress_gzip(const fs::path& from, const fs::path& to) {
    const std::string data = file_bytes(from);
    gzFile out = gzopen(to.c_str(), "wb");
    REQUIRE(out != nullptr);
    REQUIRE(gzwrite(out, data.data(), static_cast<unsigned>(data.size())) ==
            static_cast<int>(data.size()));
    REQUIRE(gzclose(out) == Z_OK);
}

// Hides this machine's data sets: neither environment nor working directory leads to one.
struct Isolated {
    TempDir dir;
    ScopedWorkingDirectory cwd{dir.path()};
    ScopedEnv home{"HOME", (dir.path() / "home").c_str()};
    ScopedEnv data{"GYRE_DATA", nullptr};
};

}  // namespace

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
                        // The content decides on decompression, so plain content will do.
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

    // These are not names of a set: nothing before the dash, no dash, more after the name.
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

    // An incomplete set is reported, not skipped.
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
                 {"\"nonesuch\" not found", "one/nonesuch (no files of a set in it)",
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
